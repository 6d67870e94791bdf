-- audit: recomputes every sum from the records; changes nothing.
-- KEYS as in _lib.lua. ARGV[2]: unused.
-- Result: packed {{what, stored, recomputed}, ...} for blocks, sequences, reservations and orphans per replica, live
--   reservations per lane, blocks per replica and lane, bytes per device, and the sizes of the indexes.
-- Cost: O(records), in one go: an operator's command, not a poll.
local per, in_lane, lane_blocks, devices, live, buried = {}, {}, {}, {}, 0, 0
local flat = call('HGETALL', RES)
for i = 1, #flat, 2 do
  local r = unpack_one(flat[i + 1])
  if r[STATE] == 't' then
    buried = buried + 1
  else
    local s = per[r[REPLICA]] or {0, 0, 0, 0}
    s[1], s[2], s[3] = s[1] + r[CURRENT], s[2] + r[SEQS], s[3] + 1
    if r[STATE] == 'o' then s[4] = s[4] + 1 end
    per[r[REPLICA]], live = s, live + 1
    in_lane[r[LANE_OF]] = (in_lane[r[LANE_OF]] or 0) + 1
    local both = r[REPLICA] .. SEP .. r[LANE_OF]
    lane_blocks[both] = (lane_blocks[both] or 0) + r[CURRENT]
  end
end
for _, entry in ipairs(call('ZRANGEBYLEX', DEVX, '-', '+')) do
  local device, bytes = string.match(entry, '^([^\31]*)\31[^\31]*\31(%d+)$')
  devices[device] = (devices[device] or 0) + tonumber(bytes)
end

local lines = {}
local function line(what, stored, found) lines[#lines + 1] = {what, stored, found} end
local stored = call('HGETALL', SUM)
for i = 1, #stored, 2 do
  local name, s = stored[i], unpack_one(stored[i + 1])
  local f = per[name] or {0, 0, 0, 0}
  line(name .. ' kv_blocks', s[S_KV], f[1])
  line(name .. ' sequences', s[S_SEQ], f[2])
  line(name .. ' reservations', s[S_N], f[3])
  line(name .. ' orphaned', s[S_ORPHANS], f[4])
  for lane, blocks in pairs(s[S_LANES]) do
    line(name .. ' lane ' .. lane .. ' kv_blocks', blocks, lane_blocks[name .. SEP .. lane] or 0)
    lane_blocks[name .. SEP .. lane] = nil
  end
  per[name] = nil
end
for name, f in pairs(per) do line(name .. ' kv_blocks', 0, f[1]) end
for both, blocks in pairs(lane_blocks) do
  if blocks ~= 0 then line(string.gsub(both, SEP, ' lane ') .. ' kv_blocks', 0, blocks) end
end
stored = call('HGETALL', LANE)
for i = 1, #stored, 2 do
  line('lane ' .. stored[i] .. ' reservations', tonumber(stored[i + 1]), in_lane[stored[i]] or 0)
  in_lane[stored[i]] = nil
end
for lane, n in pairs(in_lane) do line('lane ' .. lane .. ' reservations', 0, n) end
stored = call('HGETALL', DEVP)
for i = 1, #stored, 2 do
  line('device ' .. stored[i] .. ' pending_bytes', tonumber(stored[i + 1]), devices[stored[i]] or 0)
  devices[stored[i]] = nil
end
for device, bytes in pairs(devices) do line('device ' .. device .. ' pending_bytes', 0, bytes) end
line('index reservations', call('ZCARD', IDX), live)
line('index due', call('ZCARD', DUE), live + buried)
if live == 0 then line('index joins', call('HLEN', JOIN), 0) end
line('index tombstones', call('ZCARD', ENDED), buried)
return pack(lines)
