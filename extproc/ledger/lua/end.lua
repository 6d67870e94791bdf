-- end: batches of end records; the first one of a rid ends it, each leaves a tombstone, known or not.
-- KEYS as in _lib.lua. ARGV[2]: a list of batches of {rid or '', owner, request_id, how, ended_age_us, replica or '',
--   cool_us, first_age_us or -1, clean, began_age_us or -1}. Without a rid, (owner, request_id) finds the latest
--   reservation if it was made during this exchange and never had a record of its own: the client left while we decided.
--   Request ids are the clients' to choose, so this may be another request's: it becomes an orphan, which its next record
--   brings back, and is not released here.
-- Result: a list of {1 if this call ended it, else 0, ...}, one for each batch.
-- Invariant: stock leaves the sums once: at a clean end now, else when its cooling is over; an unclean end before the
--   first byte gives the unserved prefill back at once.
-- An exchange's begin is known this much too late at worst: its record was on the way for a while.
local JOIN_SLACK_US = 1000000
-- Due entries looked after on the way, for each end: each leaves one tombstone, and more than one goes, so none pile up.
local SWEEP = 2
local now = clock()
pool(now)
local batches, rids, ends = unpack_one(ARGV[2]), {}, 0
for _, batch in ipairs(batches) do
  for _, e in ipairs(batch) do
    ends = ends + 1
    if e[1] ~= '' then rids[#rids + 1] = e[1] end
  end
end
sweep(now, SWEEP * ends)
fetch(rids)

local function join(owner, request, began, ended)
  local known = joins[owner .. SEP .. request]
  local rid = known
  if known == nil then rid = call('HGET', JOIN, owner .. SEP .. request) end
  local r = rid and record_of(rid)
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
  unorphan(rid, r)
  r[STATE], r[ENDED_AT], r[HOW], r[LEASE] = 'c', ended, e[4], cool_until
  keep(rid, r)
  joins[r[OWNER] .. SEP .. r[REQUEST]] = false
  enter(DUE, rid, cool_until)
end

local function take(e)
  local rid, ended = e[1], now - max(0, e[5])
  if rid == '' then
    join(e[2], e[3], e[10] >= 0 and now - e[10] - JOIN_SLACK_US or 0, ended)
    return 0
  end
  local r = record_of(rid)
  if not r then
    local none = {}
    none[REPLICA], none[MADE], none[CURRENT], none[INPUT], none[SEQS], none[FIRST], none[VRAM] = e[6], ended, 0, 0, 0, -1, {}
    bury(rid, e[4], none, ended, now)
    return 0
  end
  if r[STATE] == 't' or (e[6] ~= '' and e[6] ~= r[REPLICA]) then return 0 end
  local first = r[STATE] ~= 'c'
  if first then finish(rid, r, e, min(now, max(ended, r[MADE]))) end
  if e[4] == 'operator' then
    add_back(r)
    if not first then release(rid, r, e[4], r[ENDED_AT], now) end
  end
  return first and 1 or 0
end

local answers = {}
for i, batch in ipairs(batches) do
  local ended = {}
  for k, e in ipairs(batch) do ended[k] = take(e) end
  answers[i] = ended
end
flush()
return pack(answers)
