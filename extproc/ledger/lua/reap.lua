-- reap: does what is due by itself, and ends what has been silent under somebody's ears.
-- KEYS as in _lib.lua. ARGV[2]: {listened_us or -1, {owners}, limit, asked_us or none}: so long the caller has listened
--   to these Envoys without a pause, and has sent in every record it heard before this call. asked_us is the server's
--   own time just before the call: a server that hung reads it late, when its caller may long have heard of everybody.
-- Result: {released, more}: more = 1 if the limit was reached.
-- Invariant: a lease that expires changes a state, never a sum; an orphan of a listened-to owner goes only after
--   SILENCE_US in which neither the caller nor the ledger saw a record of it.
local now = clock()
pool(now)
local q = unpack_one(ARGV[2])
local looked, released = sweep(now, q[3])
local asked = min(now, q[4] or now)
if q[1] >= SILENCE_US then
  settle()
  for _, owner in ipairs(q[2]) do
    local rids = rids_of(call('ZRANGEBYLEX', ORPH, '[' .. owner .. SEP, '(' .. owner .. AFTER, 'LIMIT', 0, q[3]))
    fetch(rids)
    for _, rid in ipairs(rids) do
      local r = records[rid]
      if asked - r[SEEN] >= SILENCE_US then
        lapse(rid, r, now)
        released = released + 1
      end
    end
  end
end
flush()
return pack({released, looked >= q[3] and 1 or 0})
