-- How reservations end: shared by the scripts in which one can. The loader puts it after _lib.lua.

local function settle_vram(device, entry, bytes)
  if call('ZREM', DEVX, entry) == 1 and call('HINCRBY', DEVP, device, '-' .. bytes) <= 0 then
    call('HDEL', DEVP, device)
  end
end

local function bury(rid, how, r, ended, now)
  keep(rid, {'t', how, r[REPLICA], r[MADE], r[CURRENT], r[INPUT], r[SEQS], r[FIRST], ended, r[VRAM]})
  enter(DUE, rid, now + TOMBSTONE_US)
  enter(ENDED, r[REPLICA] .. SEP .. stamp(ended) .. SEP .. rid, 0)
end

-- A record that is orphaned is none any more.
local function unorphan(rid, r)
  if r[STATE] ~= 'o' then return end
  local s = sum_of(r[REPLICA])
  s[S_ORPHANS], sums_changed[r[REPLICA]] = s[S_ORPHANS] - 1, true
  leave(ORPH, r[OWNER] .. SEP .. rid)
end

-- The record leaves the sums; only its tombstone stays.
local function release(rid, r, how, ended, now)
  add_stock(r, -1)
  leave(IDX, index_entry(rid, r))
  if r[STATE] ~= 'c' then joins[r[OWNER] .. SEP .. r[REQUEST]] = false end
  unorphan(rid, r)
  bury(rid, how, r, ended, now)
end

-- What was subtracted from the engine's used blocks and now leaves without an end record may still be there.
local function add_back(r)
  local p = rep_of(r[REPLICA])
  if p and p[P_MODE] == 1 and p[P_FOREIGN] >= 0 and r[FIRST] >= 0 and r[FIRST] < p[P_START] then
    p[P_FOREIGN] = p[P_FOREIGN] + r[INPUT]
    reps_changed[r[REPLICA]] = true
  end
end

-- The unserved rest of a prompt that was aborted before its first byte leaves the bucket.
local function give_back(r, ended, now)
  local s = sum_of(r[REPLICA])
  if r[PREFILL] <= 0 or r[FIRST] >= 0 or s[S_RATE] <= 0 then return end
  local level = level_at(s, s[S_RATE], now)
  local served = min(r[PREFILL], max(0, s[S_RATE] * (ended - r[MADE]) / 1000000 - r[AHEAD]))
  s[S_LEVEL], s[S_AT] = max(0, level - (r[PREFILL] - served)), now
  sums_changed[r[REPLICA]] = true
end

local function lapse(rid, r, now)
  add_back(r)
  give_back(r, now, now)
  release(rid, r, 'orphaned', now, now)
end

local function orphan(rid, r, now)
  local s = sum_of(r[REPLICA])
  sums_changed[r[REPLICA]] = true
  r[STATE], s[S_ORPHANS] = 'o', s[S_ORPHANS] + 1
  keep(rid, r)
  enter(ORPH, r[OWNER] .. SEP .. rid, 0)
  enter(DUE, rid, r[MADE] + r[CAP_US])
end

local function forget(rid, t)
  for i = 1, #t[10], 2 do
    local bytes = format('%d', t[10][i + 1])
    settle_vram(t[10][i], t[10][i] .. SEP .. rid .. SEP .. bytes, bytes)
  end
  keep(rid, false)
  leave(DUE, rid)
  leave(ENDED, t[3] .. SEP .. stamp(t[9]) .. SEP .. rid)
end

-- Does what is due, oldest first, at most `limit` entries; returns how many were looked at and how many released.
local function sweep(now, limit)
  settle()
  local rids, released = call('ZRANGEBYSCORE', DUE, '-inf', stamp(now), 'LIMIT', 0, limit), 0
  fetch(rids)
  for _, rid in ipairs(rids) do
    local r = records[rid]
    if not r then
      leave(DUE, rid)
    elseif r[STATE] == 't' then
      forget(rid, r)
    elseif r[STATE] == 'c' then
      release(rid, r, r[HOW], r[ENDED_AT], now)
      released = released + 1
    elseif r[STATE] == 'o' then
      lapse(rid, r, now)
      released = released + 1
    else
      orphan(rid, r, now)
    end
  end
  return #rids, released
end
