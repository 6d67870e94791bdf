-- line: those who were refused and told when to come back (line.py states the same).
-- KEYS as in _lib.lua. ARGV[2]: {token, replica, blocks, wait_us, since_us, run_us}: with a replica the request `token` was
--   refused and told to come back to it in wait_us, where it needs blocks for run_us (-1: unknown); since_us: when it was
--   refused first, -1 now. Without a replica the request has come: it takes up its promise, due or not.
-- Result: {since_us or -1, its replica or '', {{replica, before, after}, ...}}: what is promised to others there, flat lists
--   of {due_us, blocks, run_us} of those refused before it (a newcomer: all) and after it; nothing while too few promises
--   are taken up.
-- Invariant: at most MOST promises, none later than LATE_US; stock is never touched.
-- Cost: O(promises).
local EARLY_US, LATE_US, WORTH_KEEPING, WEIGHT, MOST = 20000, 1100000, 0.75, 1 / 16, 256
-- Between a token and its run. Releases that know no runs take both for a token, and whoever comes to them for a newcomer.
local RUN = '\30'
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

local function parsed(entry)
  local name, replica, blocks, since, due = string.match(entry, '^([^\31]*)\31([^\31]*)\31(%d+)\31(%d+)\31(%d+)$')
  local token, run = string.match(name, '^([^\30]*)\30(%d+)$')
  return {token or name, replica, tonumber(blocks), tonumber(since), tonumber(due), run and tonumber(run) or -1}
end
local TOKEN, REPLICA_OF, BLOCKS, SINCE, DUE_AT, RUN_OF = 1, 2, 3, 4, 5, 6

local every, mine = {}, nil
for _, entry in ipairs(call('ZRANGEBYSCORE', LINE, '-inf', '+inf')) do
  local one = parsed(entry)
  if not mine and one[TOKEN] == q[1] then
    mine = one
    if q[2] == '' then call('ZREM', LINE, entry) end
  else
    every[#every + 1] = one
  end
end

if q[2] ~= '' then
  -- Of requests with the same bytes one has a place: nobody can tell the others' return from a newcomer.
  if not mine and #every < MOST then
    local due, since = now + q[4], q[5] >= 0 and q[5] or now
    local name = q[6] >= 0 and format('%s%s%.0f', q[1], RUN, q[6]) or q[1]
    call('ZADD', LINE, stamp(due), format('%s\31%s\31%.0f\31%016.0f\31%016.0f', name, q[2], q[3], since, due))
  end
  save()
  return pack({-1, '', {}})
end

-- Who comes before its time has neither kept its promise nor broken it.
if mine and mine[DUE_AT] <= now + EARLY_US then kept = kept + (1 - kept) * WEIGHT end
save()
local others, at = {}, {}
if kept >= WORTH_KEEPING then
  for _, one in ipairs(every) do
    local name = one[REPLICA_OF]
    if not at[name] then
      at[name] = {name, {}, {}}
      others[#others + 1] = at[name]
    end
    local dues = at[name][(not mine or one[SINCE] < mine[SINCE]) and 2 or 3]
    local n = #dues
    dues[n + 1], dues[n + 2], dues[n + 3] = one[DUE_AT], one[BLOCKS], one[RUN_OF]
  end
end
return pack({mine and mine[SINCE] or -1, mine and mine[REPLICA_OF] or '', others})
