-- line: those who were refused and told when to come back (line.py states the same).
-- KEYS as in _lib.lua. ARGV[2]: {token, replica, blocks, wait_us, since_us}: with a replica the request `token` was refused
--   and told to come back to it in wait_us, where it needs blocks; since_us: when it was refused first, -1 now.
--   Without a replica the request has come: it takes up its promise, if it has one that is due.
-- Result: {since_us or -1, its replica or '', blocks promised there to those refused before it, {replica, blocks, ...}};
--   no blocks at all while too few promises are taken up.
-- Invariant: at most MOST promises, none later than LATE_US; stock is never touched.
-- Cost: O(promises).
local EARLY_US, LATE_US, WORTH_KEEPING, WEIGHT, MOST = 20000, 500000, 0.75, 1 / 16, 256
local now = clock()
pool(now)
local q = unpack_one(ARGV[2])
local was = tonumber(call('HGET', META, 'kept') or 0)
local kept = was

for _, entry in ipairs(call('ZRANGEBYSCORE', LINE, '-inf', '(' .. stamp(now - LATE_US))) do
  call('ZREM', LINE, entry)
  kept = kept - kept * WEIGHT
end

local function save()
  if kept ~= was then call('HSET', META, 'kept', format('%.17g', kept)) end
end

if q[2] ~= '' then
  local due, since = now + q[4], q[5] >= 0 and q[5] or now
  -- Of requests with the same bytes one has a place: nobody can tell the others' return from a newcomer.
  local alone = true
  for _, entry in ipairs(call('ZRANGEBYSCORE', LINE, '-inf', '+inf')) do
    if string.sub(entry, 1, #q[1] + 1) == q[1] .. SEP then alone = false end
  end
  if alone and call('ZCARD', LINE) < MOST then
    call('ZADD', LINE, stamp(due), format('%s\31%s\31%.0f\31%016.0f\31%016.0f', q[1], q[2], q[3], since, due))
  end
  save()
  return pack({-1, '', 0, {}})
end

local every, mine = {}, nil
for _, entry in ipairs(call('ZRANGEBYSCORE', LINE, '-inf', '+inf')) do
  local token, replica, blocks, since, due = string.match(entry, '^([^\31]*)\31([^\31]*)\31(%d+)\31(%d+)\31(%d+)$')
  local one = {replica, tonumber(blocks), tonumber(since)}
  if not mine and token == q[1] and tonumber(due) <= now + EARLY_US then
    mine = one
    call('ZREM', LINE, entry)
    kept = kept + (1 - kept) * WEIGHT
  else
    every[#every + 1] = one
  end
end
save()
local ahead, names, before = {}, {}, 0
if kept >= WORTH_KEEPING then
  for _, one in ipairs(every) do
    if not ahead[one[1]] then names[#names + 1] = one[1] end
    ahead[one[1]] = (ahead[one[1]] or 0) + one[2]
    if mine and one[1] == mine[1] and one[3] < mine[3] then before = before + one[2] end
  end
end
local flat = {}
for i, name in ipairs(names) do flat[2 * i - 1], flat[2 * i] = name, ahead[name] end
return pack({mine and mine[3] or -1, mine and mine[1] or '', before, flat})
