-- reservations: every live reservation of one replica, earliest expected end first; changes nothing.
-- KEYS as in _lib.lua. ARGV[2]: {replica}. Result: {packed {rid, R}, ...}. Cost: O(its reservations).
local found = {}
for i, entry in ipairs(indexed(unpack_one(ARGV[2])[1])) do
  local rid = rid_of(entry)
  found[i] = pack({rid, unpack_one(call('HGET', RES, rid))})
end
return found
