-- Writes the name the engine knows over the model name the client used. Runs in the upstream filter chain of one
-- cluster, once per attempt; the body of each attempt is the one kvgate forwarded.
--
-- Filter state kvgate.model-at: "START-END", byte span of the top-level model's value, quotes included, END
--   exclusive (kvgate parsed the body; nothing is searched for here). Absent: nothing is changed.
-- Filter state kvgate.adapter: an adapter the client asked for; if this target lists it, its name is kept.
-- SERVED: the replacement, JSON text with quotes. ADAPTERS: set of names. Both are defined above by the generator.
function envoy_on_request(handle)
  local state = handle:streamInfo():filterState()
  local first, last = string.match(state:get("kvgate.model-at") or "", "^(%d+)-(%d+)$")
  if first == nil or ADAPTERS[state:get("kvgate.adapter") or ""] then
    return
  end
  local body = handle:body()
  if body == nil then
    return
  end
  local text = body:getBytes(0, body:length())
  first, last = tonumber(first), tonumber(last)
  if last - first < 2 or string.byte(text, first + 1) ~= 34 or string.byte(text, last) ~= 34 then
    handle:logErr("kvgate: no JSON string at the span of the model name; the body is sent unchanged")
    return
  end
  local size = body:setBytes(string.sub(text, 1, first) .. SERVED .. string.sub(text, last + 1))
  if handle:headers():get("content-length") then
    handle:headers():replace("content-length", tostring(size))
  end
end
