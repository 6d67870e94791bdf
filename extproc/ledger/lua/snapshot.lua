-- snapshot: every sum and report of the pool at one moment; changes nothing.
-- KEYS as in _lib.lua. ARGV[2]: unused.
-- Result: {packed {now, epoch, loss_us, live sidecars}, rep, sum, lane, dev, devp}, each hash as a flat list.
-- Cost: O(replicas + devices + lanes).
local now = clock()
local m = call('HMGET', META, 'epoch', 'loss_us')
local alive = call('ZCOUNT', ALIVE, '(' .. stamp(now), '+inf')
return {pack({now, m[1] or '', tonumber(m[2] or 0), alive}), call('HGETALL', REP), call('HGETALL', SUM),
  call('HGETALL', LANE), call('HGETALL', DEV), call('HGETALL', DEVP)}
