-- reserve: takes room for each of some requests on the first of its candidates that has room for everything, or on none.
-- KEYS as in _lib.lua. ARGV[2]: a list of {rid, lane, owner, request_id, klass, input_tokens, expected_out, max_out,
--   lane_limit, lease_us, fresh_us, unknown_us, force, candidates}, decided one after the other; a candidate:
--   {target, replica, remote, kv_blocks, input_blocks, kv_bytes, prefill_tokens, sequences, {vram bytes}, cap_blocks,
--    cap_us, {devices}, guard_bytes, static_capacity, static_max_sequences, watermark, keep_free_blocks, prefill_rate,
--    prefill_capacity, max_waiting, lane_share, lane_yields_at, expected_us,
--    {due_us, blocks, run_us or -1, ...} promised to those refused before it, the same of those refused after it};
--   -1 = not set.
-- Result: a list of {chosen (0-based, -1 none), now, ended, verdicts}; a verdict:
--   {refused_by or '', state, capacity, committed, headroom, retry_us}; -1 = unknown, for headroom false.
-- Invariant: without force, capacity >= committed + keep_free after the call on the chosen replica, and every other
--   stock holds; a rid that is live is answered again without taking anything; an ended one takes nothing.
-- Cost: O(candidates) for each, plus a walk of at most WALK entries for a refused one's retry time.
local WALK, SWEEP = 64, 64
local now = clock()
local epoch, loss = pool(now)
-- The request that is decided on, and its lane.
local q, lane

local function devices_refuse(c, fresh_for)
  for i, uuid in ipairs(c[12]) do
    local raw, vram = call('HGET', DEV, uuid), c[9][i] or 0
    local d = raw and unpack_one(raw)
    local live = d and d[1] ~= 'unknown' and d[4] > now and now - d[2] <= fresh_for
    if d and d[1] == 'lost' then return 'unknown_state' end
    if not live or d[3] < 0 then
      if vram > 0 then return 'unknown_state' end
    elseif d[3] - tonumber(call('HGET', DEVP, uuid) or 0) - vram < c[13] then
      return 'insufficient_headroom'
    end
  end
end

-- {expected end, blocks, sequences, lane} of the replica's first reservations, until something is taken or ends.
local walks = {}
local function walk(replica)
  local found = walks[replica]
  if not found then
    found = {}
    for i, entry in ipairs(indexed(replica, WALK)) do
      local due, blocks, seqs, of = string.match(entry, '^[^\31]*\31(%d+)\31(%d+)\31(%d+)\31([^\31]*)')
      found[i] = {tonumber(due), tonumber(blocks), tonumber(seqs), of}
    end
    walks[replica] = found
  end
  return found
end

-- How much longer one of them is expected to run: one that is overdue half of its overrun more, or a fifth of what the
-- asker itself is expected to run (`run`).
local function left_of(one, run)
  local left = one[1] - now
  return left >= 0 and left or max(floor(-left / 2), floor(run / 5), 100000)
end

-- Time until `wanted` of column (1 blocks, 2 sequences) is free again, judged by the expected ends of the lane's (or,
-- with `lane_name` nil, all) reservations.
local function frees_in(run, replica, wanted, column, lane_name, others)
  local t = 0
  for _, one in ipairs(walk(replica)) do
    if not lane_name or (one[4] == lane_name) ~= (others or false) then
      t = max(t, left_of(one, run))
      wanted = wanted - one[column + 1]
      if wanted <= 0 then return t end
    end
  end
  return -1
end

-- Time until `need` blocks fit for the whole of `run` beside what is promised (rules.py, starts_in_us).
local function starts_in(run, replica, free, need, before, after)
  local change, times = {}, {}
  local function add(at, blocks)
    if not change[at] then
      times[#times + 1] = at
      change[at] = 0
    end
    change[at] = change[at] + blocks
  end
  for _, one in ipairs(walk(replica)) do add(left_of(one, run), one[2]) end
  for _, dues in ipairs({before, after}) do
    for i = 1, #dues, 3 do
      local at = max(0, dues[i] - now)
      add(at, -dues[i + 1])
      add(at + max(1, dues[i + 2] >= 0 and dues[i + 2] or run), dues[i + 1])
    end
  end
  free = free + (change[0] or 0)
  local start = free >= need and 0 or -1
  table.sort(times)
  for _, at in ipairs(times) do
    if at > 0 then
      if start >= 0 and at - start >= run then break end
      free = free + change[at]
      if free < need then
        start = -1
      elseif start < 0 then
        start = at
      end
    end
  end
  return start
end

local function lane_frees_in(run)
  local best = -1
  for _, c in ipairs(q[14]) do
    if c[3] == 0 then
      local t = frees_in(run, c[2], 0, 2, lane)
      if t >= 0 and (best < 0 or t < best) then best = t end
    end
  end
  return best
end

-- State, refusal by state, and the pool's size in blocks (-1 unknown).
local function health(c, p, s)
  local known = p and p[P_EXPIRES] > now
  local size = known and p[P_CAPACITY] or -1
  if size < 0 then size = c[14] end
  if s[S_DRAINED] == 1 then return 'draining', 'not_ready', size end
  if loss > 0 and now < loss + LOSS_US and not (known and p[P_PROVEN] == epoch) then return 'unknown', 'unknown_state', -1 end
  if not known then
    if size >= 0 then return 'ready', nil, size end
    return 'unknown', 'unknown_state', -1
  end
  local state, age = p[P_STATE], now - p[P_START]
  if state == 'draining' then return state, 'not_ready', size end
  if state ~= 'ready' and state ~= 'stale' then return state, 'unknown_state', -1 end
  if age > q[12] or size < 0 or p[P_FOREIGN] < 0 then return 'unknown', 'unknown_state', -1 end
  if age <= q[11] then return 'ready', nil, size end
  if p[P_BYPASS] >= 0 and now - p[P_BYPASS] <= BYPASS_US then return 'unknown', 'unknown_state', -1 end
  return 'stale', nil, size
end

-- Live reservations per lane when the call began; `lanes` has what it added.
local lane_live = {}
local function live_in(name)
  lane_live[name] = lane_live[name] or tonumber(call('HGET', LANE, name) or 0)
  return lane_live[name] + (lanes[name] or 0)
end

local function stocks(c, p, s, state, room, head)
  local replica, need, keep, run = c[2], c[4], min(c[17], floor(room * 0.25)), c[23]
  -- An engine that is still loading reports a pool without blocks; that is no size to refuse by for good.
  if need > 0 and room <= 0 then return 'unknown_state', -1 end
  if need > room - keep or (c[21] >= 0 and need > floor(c[21] * room)) then return 'exceeds_pool', -1 end
  -- An idle replica takes whoever comes.
  local before, after = s[S_N] > 0 and c[24] or {}, s[S_N] > 0 and c[25] or {}
  if #before == 0 and #after == 0 then
    if head - need < keep then return 'insufficient_headroom', frees_in(run, replica, need + keep - head, 1) end
  elseif head - need < keep or starts_in(run, replica, head - keep, need, before, {}) ~= 0 then
    return 'insufficient_headroom', starts_in(run, replica, head - keep, need, before, after)
  end
  if c[18] > 0 and c[19] >= 0 and c[7] > 0 and s[S_N] > 0 then
    local over = level_at(s, c[18], now) + c[7] - c[19]
    if over > 0 then
      if c[7] <= c[19] then return 'prefill_busy', floor(over / c[18] * 1000000) end
      return 'prefill_busy', frees_in(run, replica, s[S_SEQ], 2)
    end
  end
  local slots = (p and p[P_EXPIRES] > now) and p[P_MAXSEQ] or -1
  if slots < 0 then slots = c[15] end
  local seqs = min(c[8], slots)
  if slots >= 0 and s[S_SEQ] + seqs > slots then return 'sequences_full', frees_in(run, replica, s[S_SEQ] + seqs - slots, 2) end
  if q[9] >= 0 and live_in(lane) + 1 > q[9] then return 'lane_full', lane_frees_in(run) end
  local own = s[S_LANES][lane] or 0
  if c[21] >= 0 and own + need > floor(c[21] * room) then
    return 'lane_share', frees_in(run, replica, own + need - floor(c[21] * room), 1, lane)
  end
  if c[22] >= 0 and s[S_KV] - own >= c[22] * room then
    return 'lane_share', frees_in(run, replica, floor(s[S_KV] - own - c[22] * room) + 1, 1, lane, true)
  end
  local device = devices_refuse(c, q[12])
  if device then return device, -1 end
  if p and state == 'ready' and p[P_EXPIRES] > now and c[20] >= 0 and p[P_WAITING] >= max(1, c[20]) then return 'engine_queue', -1 end
end

local function assess(c, tried)
  if c[3] == 1 then return {tried and 'not_tried' or '', 'ready', -1, -1, false, -1} end
  local p, s = rep_of(c[2]), sum_of(c[2])
  local state, refused, size = health(c, p, s)
  if size < 0 then return {tried and 'not_tried' or refused or '', state, -1, -1, false, -1} end
  local room = size - math.ceil(size * c[16])
  local foreign = (p and p[P_EXPIRES] > now and p[P_FOREIGN] > 0) and p[P_FOREIGN] or 0
  local committed, retry = s[S_KV] + foreign, -1
  if tried then
    refused = 'not_tried'
  elseif not refused then
    refused, retry = stocks(c, p, s, state, room, room - committed)
  end
  return {refused or '', state, room, committed, room - committed, retry or -1}
end

local function take(c, v)
  local vram, s = {}, sum_of(c[2])
  for i, uuid in ipairs(c[12]) do vram[2 * i - 1], vram[2 * i] = uuid, c[9][i] or 0 end
  local ahead = c[18] > 0 and level_at(s, c[18], now) or 0
  insert(q[1], {'r', c[1], c[2], lane, q[3], q[4], q[5], now, c[4], c[5], c[6], c[7], c[8], q[6], q[7], q[8], c[10], c[11],
    c[23], vram, c[4], now + q[10], -1, now, -1, ahead, v[3], v[4], ''})
  if c[18] > 0 then s[S_LEVEL], s[S_AT], s[S_RATE] = ahead + c[7], now, c[18] end
  walks[c[2]] = nil
end

local function again(r)
  local live, verdicts, chosen = r[STATE] == 'r' or r[STATE] == 'o', {}, -1
  for i, c in ipairs(q[14]) do
    local v = {'not_tried', 'unknown', -1, -1, false, -1}
    if live and chosen < 0 and c[1] == r[TARGET] and c[2] == r[REPLICA] then
      chosen = i - 1
      v = {'', 'ready', r[POOL_THEN], r[COMMITTED_THEN], r[POOL_THEN] >= 0 and r[POOL_THEN] - r[COMMITTED_THEN], -1}
    end
    verdicts[i] = v
  end
  return {chosen, now, live and 0 or 1, verdicts}
end

local function look()
  local verdicts, fits = {}, -1
  for i, c in ipairs(q[14]) do
    verdicts[i] = assess(c, fits >= 0)
    if fits < 0 and verdicts[i][1] == '' then fits = i - 1 end
  end
  return verdicts, fits
end

local function first_local()
  for i, c in ipairs(q[14]) do
    if c[3] == 0 then return i - 1 end
  end
end

local sweep
local function decide()
  local known = record_of(q[1])
  if known then return again(known) end
  local verdicts, chosen = look()
  -- What is due gives room back only where room was wanting, so the usual reserve does not pay for looking after it.
  if chosen ~= 0 then
    settle()
    if #call('ZRANGEBYSCORE', DUE, '-inf', stamp(now), 'LIMIT', 0, 1) > 0 then
      sweep = sweep or keeper()
      sweep(now, SWEEP)
      walks = {}
      verdicts, chosen = look()
    end
  end
  if q[13] == 1 then chosen = first_local() or chosen end
  if chosen >= 0 and q[14][chosen + 1][3] == 0 then take(q[14][chosen + 1], verdicts[chosen + 1]) end
  return {chosen, now, 0, verdicts}
end

local requests, rids, answers = unpack_one(ARGV[2]), {}, {}
for i, request in ipairs(requests) do rids[i] = request[1] end
fetch(rids)
for i, request in ipairs(requests) do
  q, lane = request, request[2]
  answers[i] = decide()
end
flush()
return pack(answers)
