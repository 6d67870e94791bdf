-- lessons: what sidecars learned from past answers, told by those who hear the answers' ends and heard by all.
-- KEYS as in _lib.lua. ARGV[2]: a list of {name, weight, {figures}} that one sidecar tells.
-- Result: the same of everything known. Of one name the lesson of most weight stays, unless it was last told FADES_US ago;
--   one that nobody told for FORGOTTEN_US goes.
-- Invariant: at most MOST names; stock is never touched. Cost: O(names), every few seconds.
local FADES_US, FORGOTTEN_US, MOST = 60000000, 2592000000000, 1000
local now = clock()
pool(now)
local lessons, count, gone = {}, 0, {}
local stored = call('HGETALL', LESSONS)
for i = 1, #stored, 2 do
  local lesson = unpack_one(stored[i + 1])
  if now - lesson[3] > FORGOTTEN_US then
    gone[#gone + 1] = stored[i]
  else
    lessons[stored[i]], count = lesson, count + 1
  end
end
if #gone > 0 then call('HDEL', LESSONS, unpack(gone)) end
for _, told in ipairs(unpack_one(ARGV[2])) do
  local name, weight = told[1], told[2]
  local known = lessons[name]
  if known and (weight >= known[1] or now - known[3] > FADES_US) or not known and count < MOST then
    count = known and count or count + 1
    lessons[name] = {weight, told[3], now}
    call('HSET', LESSONS, name, pack(lessons[name]))
  end
end
local all = {}
for name, lesson in pairs(lessons) do all[#all + 1] = {name, lesson[1], lesson[2]} end
return pack(all)
