-- reservations: every live reservation of one replica, earliest expected end first; changes nothing.
-- KEYS as in _lib.lua. ARGV[2]: {replica}. Result: {packed {rid, R}, ...}. Cost: O(its reservations).
local found, rids = {}, rids_of(indexed(unpack_one(ARGV[2])[1]))
fetch(rids)
for i, rid in ipairs(rids) do found[i] = pack({rid, records[rid]}) end
return found
