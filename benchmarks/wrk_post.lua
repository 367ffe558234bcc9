-- A script of wrk: POSTs the body of a file, and prints what was answered as a line of JSON.
--     wrk -s wrk_post.lua URL -- BODY.json
-- Complete answers count, whole streams among these: a stream has events, of which errors
-- begin with an error.

local threads = {}

function setup(thread)
   table.insert(threads, thread)
end

function init(args)
   local file = assert(io.open(args[1], "r"))
   local body = file:read("*a")
   -- Without a body the request asks instead.
   if body ~= "" then
      wrk.method = "POST"
      wrk.body = body
      wrk.headers["Content-Type"] = "application/json"
   end
   file:close()
   num_events, num_errors = 0, 0
end

function response(status, headers, body)
   if status ~= 200 then
      num_errors = num_errors + 1
      if num_errors == 1 then
         io.stderr:write(status, " ", body, "\n")
      end
   end
   local from = string.find(body, "data: ", 1, true)
   while from do
      num_events = num_events + 1
      if string.sub(body, from + 6, from + 13) == '{"error"' then
         num_errors = num_errors + 1
      end
      from = string.find(body, "data: ", from + 6, true)
   end
end

function done(summary, latency, requests)
   local events, errors = 0, 0
   for _, thread in ipairs(threads) do
      events = events + thread:get("num_events")
      errors = errors + thread:get("num_errors")
   end
   local socket = summary.errors
   errors = errors + socket.connect + socket.read + socket.write + socket.timeout
   print(string.format(
      '{"requests": %d, "events": %d, "errors": %d, "seconds": %.6f, "p50_ms": %.3f, "p99_ms": %.3f}',
      summary.requests, events, errors, summary.duration / 1e6,
      latency:percentile(50) / 1e3, latency:percentile(99) / 1e3
   ))
end
