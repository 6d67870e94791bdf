-- publish: one round of an agent: what the engines and the devices show, and the foreign load that follows from it.
-- KEYS as in _lib.lua. ARGV[2]: {ttl_us, periodic_us, replicas, devices}; a replica:
--   {name, state, start_us, end_us, capacity, used, shows_used, running, waiting, max_sequences, engine_start_us, blob},
--   a device: {uuid, state, start_us, free_bytes, blob}; -1 = not shown. Start and end are those of the scrape.
-- Result: {{name, foreign (-1 unknown), bypass, voided, taken}, ...}: taken = 0 for a scrape older than the last one or
--   more than FUTURE_US ahead of the server's clock.
-- Invariant: committed = sum of the reservations + foreign never falls below what the scrape shows to be used, as far
--   as the scrape can tell whose it is; what was made before an engine's start is void, and nothing later.
-- Cost: O(reservations of the named replicas), and once a minute O(replicas).
local FUTURE_US, IDLE_US, IDLE_SILENT_US = 1000000, 5000000, 2500000
local TIDY_US, FORGET_US, TRIAL_US = 60000000, 3600000000, 3000000
-- Ends that Envoy saw, at the time that it saw them.
local WITNESSES = {complete = true, client_abort = true, upstream_reset = true, upstream_error = true, timeout = true}
local now = clock()
local epoch, loss = pool(now)
local q, answers = unpack_one(ARGV[2]), {}
sweep(now, 64)

local function void(rid, r)
  give_back(r, now, now)
  release(rid, r, 'voided', r[ENDED_AT] >= 0 and r[ENDED_AT] or now, now)
end

-- Ours: made before the scrape's end and not ended GRACE_US before its start.
local function tally(t, made, first, ended, blocks, input, seqs, start, stop)
  if made >= stop then return end
  if ended < 0 or ended >= start - GRACE_US then t.seqs, t.blocks = t.seqs + seqs, t.blocks + blocks end
  if first >= 0 and first < start and (ended < 0 or ended >= stop) then t.input = t.input + input end
end

local function ours(name, start, stop, engine_start, idle)
  local t = {seqs = 0, blocks = 0, input = 0, voided = 0}
  local from = '[' .. name .. SEP .. stamp(max(0, start - GRACE_US)) .. SEP
  settle()
  local rids = rids_of(call('ZRANGEBYLEX', ENDED, from, '(' .. name .. AFTER))
  fetch(rids)
  for _, rid in ipairs(rids) do
    local d = records[rid]
    if d[4] >= engine_start then tally(t, d[4], d[8], d[9], d[5], d[6], d[7], start, stop) end
  end
  rids = rids_of(indexed(name))
  fetch(rids)
  for _, rid in ipairs(rids) do
    local r = records[rid]
    if r[MADE] < engine_start then
      void(rid, r)
      t.voided = t.voided + 1
    elseif idle and r[STATE] == 'o' and start >= r[MADE] + IDLE_US and r[SEEN] <= start - IDLE_SILENT_US then
      lapse(rid, r, now)
    else
      tally(t, r[MADE], r[FIRST], r[ENDED_AT], r[CURRENT], r[INPUT], r[SEQS], start, stop)
    end
  end
  return t
end

-- Sequences that later records show to have been there during the whole of an earlier scrape. A reservation that is
-- merely not known to have ended may have, and then its place in the engine's count is another's (model seed 913892).
local function witnessed(name, start, stop)
  local seqs = 0
  settle()
  local rids = rids_of(call('ZRANGEBYLEX', ENDED, '[' .. name .. SEP .. stamp(stop) .. SEP, '(' .. name .. AFTER))
  fetch(rids)
  for _, rid in ipairs(rids) do
    local d = records[rid]
    if d[4] < start and WITNESSES[d[2]] then seqs = seqs + d[7] end
  end
  for _, rid in ipairs(rids_of(indexed(name))) do
    local r = record_of(rid)
    local last = r[SEEN]
    if r[STATE] == 'c' then last = WITNESSES[r[HOW]] and r[ENDED_AT] or -1 end
    if r[MADE] < start and last >= stop then seqs = seqs + r[SEQS] end
  end
  return seqs
end

-- The scrape that has to be confirmed: an empty one at once, else the earlier for as long as it may still be.
local function next_trial(trial, start, stop, load, ripe)
  if start < ripe or load < 0 then return nil end
  if load == 0 or not trial or trial[1] < ripe or start - trial[1] >= TRIAL_US then return {start, stop, load} end
  return trial
end

local function foreign_blocks(used, shows, bypass, t)
  if shows == 0 then return bypass and -1 or 0 end
  if used < 0 then return -1 end
  return max(0, used - (bypass and t.input or t.blocks))
end

local function take(c)
  local name, start, old = c[1], min(c[3], now), rep_of(c[1])
  if c[3] > now + FUTURE_US or (old and old[P_START] > start) then
    return {name, old and old[P_FOREIGN] or -1, 0, 0, 0}
  end
  local stop, load = min(max(c[4], start), now), c[8] >= 0 and c[8] + max(0, c[9]) or -1
  local t = ours(name, start, stop, c[11], load == 0)
  local bypass_at, proven = old and old[P_BYPASS] or -1, old and old[P_PROVEN] or ''
  if load > t.seqs then bypass_at = stop end
  local bypass = (bypass_at >= 0 and now - bypass_at <= BYPASS_US) or (load < 0 and c[7] == 1)
  local foreign = foreign_blocks(c[6], c[7], bypass, t)
  local trial = old and old[P_TRIAL] or nil
  if proven ~= epoch then
    trial = next_trial(trial, start, stop, load, loss + 3 * q[2])
    if trial and trial[3] <= witnessed(name, trial[1], trial[2]) then proven, trial = epoch, nil end
  end
  local s = sum_of(name)
  if c[5] >= 0 and foreign > max(0, old and old[P_FOREIGN] or 0) and s[S_KV] + foreign > c[5] then
    s[S_OVER_FOREIGN], sums_changed[name] = s[S_OVER_FOREIGN] + 1, true
  end
  reps[name] = {c[2], start, stop, c[5], c[9], c[10], now + q[1], foreign, bypass_at, bypass and 1 or 0, proven, c[12], trial}
  reps_changed[name] = true
  return {name, foreign, bypass and 1 or 0, t.voided, 1}
end

local function take_device(d)
  local raw, start = call('HGET', DEV, d[1]), min(d[3], now)
  local old = raw and unpack_one(raw)
  if d[3] > now + FUTURE_US or (old and old[2] > start) then return end
  for _, entry in ipairs(call('ZRANGEBYLEX', DEVX, '[' .. d[1] .. SEP, '(' .. d[1] .. AFTER)) do
    local rid, bytes = string.match(entry, '^[^\31]*\31([^\31]*)\31(%d+)$')
    local r = record_of(rid)
    local first, ended = -1, -1
    if r then first, ended = r[r[STATE] == 't' and 8 or FIRST], r[r[STATE] == 't' and 9 or ENDED_AT] end
    if not r or (first >= 0 and first < start) or (ended >= 0 and ended < start) then settle_vram(d[1], entry, bytes) end
  end
  call('HSET', DEV, d[1], pack({d[2], start, d[4], now + q[1], d[5]}))
end

for i, c in ipairs(q[3]) do answers[i] = take(c) end
for _, d in ipairs(q[4]) do take_device(d) end
flush()

-- Once a minute: replicas and devices that nobody has reported for an hour, and that hold nothing, are forgotten.
if now - tonumber(call('HGET', META, 'tidied_us') or 0) >= TIDY_US then
  call('HSET', META, 'tidied_us', stamp(now))
  local flat = call('HGETALL', REP)
  for i = 1, #flat, 2 do
    local s = sum_of(flat[i])
    if now - unpack_one(flat[i + 1])[P_EXPIRES] >= FORGET_US and s[S_N] == 0 and s[S_DRAINED] == 0 then
      call('HDEL', REP, flat[i])
      call('HDEL', SUM, flat[i])
    end
  end
  flat = call('HGETALL', DEV)
  for i = 1, #flat, 2 do
    if now - unpack_one(flat[i + 1])[4] >= FORGET_US then call('HDEL', DEV, flat[i]) end
  end
end
return pack(answers)
