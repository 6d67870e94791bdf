-- Puts the path of the target's base URL before the client's path. Runs in the upstream filter chain of every
-- cluster where one target has such a path, because attempts share one header map: each starts from the original.
--
-- Filter state kvgate.path: the client's path with its query. PREFIX: "" or "/some/path", defined above.
function envoy_on_request(handle)
  local path = handle:streamInfo():filterState():get("kvgate.path")
  if path ~= nil then
    handle:headers():replace(":path", PREFIX .. path)
  end
end
