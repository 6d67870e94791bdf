-- end: a batch of end records; the first one of a rid ends it, each leaves a tombstone, known or not.
-- KEYS as in _lib.lua. ARGV[2]: {{rid or '', owner, request_id, how, ended_age_us, replica or '', cool_us,
--   first_age_us or -1, clean, began_age_us or -1}, ...}. Without a rid, (owner, request_id) finds the latest reservation
--   if it was made during this exchange and never had a record of its own: the client left while we decided. Request
--   ids are the clients' to choose, so this may be another request's: it becomes an orphan, which its next record
--   brings back, and is not released here.
-- Result: {{1 if this call ended it, rid, R or false}, ...}.
-- Invariant: stock leaves the sums once: at a clean end now, else when its cooling is over; an unclean end before the
--   first byte gives the unserved prefill back at once.
-- An exchange's begin is known this much too late at worst: its record was on the way for a while.
local JOIN_SLACK_US = 1000000
-- Due entries looked after on the way: two for each tombstone that is made, so that none pile up.
local SWEEP = 2
local now = clock()
pool(now)
sweep(now, SWEEP)
local answers = {}

local function join(owner, request, began, ended)
  local rid = call('HGET', JOIN, owner .. SEP .. request)
  local raw = rid and call('HGET', RES, rid)
  local r = raw and unpack_one(raw)
  if r and r[STATE] == 'r' and r[MADE] >= began and r[MADE] <= ended and r[SEEN] <= r[MADE] then orphan(rid, r, now) end
end

local function finish(rid, r, e, ended)
  if e[8] >= 0 and r[FIRST] < 0 then r[FIRST] = now - e[8] end
  if e[4] ~= 'complete' then give_back(r, ended, now) end
  local cool_until = ended + e[7]
  if e[9] == 1 or cool_until <= now then
    release(rid, r, e[4], ended, now)
    return
  end
  if r[STATE] == 'o' then
    local s = sum_of(r[REPLICA])
    s[S_ORPHANS], sums_changed[r[REPLICA]] = s[S_ORPHANS] - 1, true
    call('ZREM', ORPH, r[OWNER] .. SEP .. rid)
  end
  r[STATE], r[ENDED_AT], r[HOW], r[LEASE] = 'c', ended, e[4], cool_until
  call('HSET', RES, rid, pack(r))
  call('HDEL', JOIN, r[OWNER] .. SEP .. r[REQUEST])
  call('ZADD', DUE, cool_until, rid)
end

for i, e in ipairs(unpack_one(ARGV[2])) do
  local rid, ended, r = e[1], now - max(0, e[5]), nil
  answers[i] = {0, rid, false}
  if rid == '' then
    join(e[2], e[3], e[10] >= 0 and now - e[10] - JOIN_SLACK_US or 0, ended)
  else
    local raw = call('HGET', RES, rid)
    r = raw and unpack_one(raw)
    if not r then
      local none = {}
      none[REPLICA], none[MADE], none[CURRENT], none[INPUT], none[SEQS], none[FIRST], none[VRAM] = e[6], ended, 0, 0, 0, -1, {}
      bury(rid, e[4], none, ended, now)
    end
  end
  if r and r[STATE] ~= 't' and (e[6] == '' or e[6] == r[REPLICA]) then
    local before = r[STATE]
    if before ~= 'c' then
      finish(rid, r, e, min(now, max(ended, r[MADE])))
      answers[i] = {1, rid, r}
    elseif e[4] == 'operator' then
      add_back(r)
      release(rid, r, e[4], r[ENDED_AT], now)
    end
    if before ~= 'c' and e[4] == 'operator' then add_back(r) end
  end
end
flush()
return pack(answers)
