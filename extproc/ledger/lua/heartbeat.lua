-- heartbeat: this sidecar lives for ttl_us more; those whose heartbeat lapsed are dropped.
-- KEYS as in _lib.lua. ARGV[2]: {instance, ttl_us} (ttl 0: it leaves). Result: number of live sidecars.
local now = clock()
pool(now)
local q = unpack_one(ARGV[2])
call('ZREMRANGEBYSCORE', ALIVE, '-inf', stamp(now))
if q[2] > 0 then call('ZADD', ALIVE, stamp(now + q[2]), q[1]) else call('ZREM', ALIVE, q[1]) end
return call('ZCARD', ALIVE)
