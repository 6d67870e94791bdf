-- init: makes sure the pool has an epoch, and reads the clock.
-- KEYS as in _lib.lua. ARGV[2]: {new} - 1 if the caller knows that nothing ran before (it started this server itself),
-- so that a missing epoch is a beginning, not a loss.
-- Result: {now, epoch, loss_us}. Invariant: an epoch that exists is never replaced.
local now = clock()
local epoch, loss = pool(now, unpack_one(ARGV[2])[1] == 1)
return pack({now, epoch, loss})
