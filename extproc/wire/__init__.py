"""The bytes between Envoy and kvgate: messages, and the full names of the gRPC methods that carry them.

``pb`` holds the generated messages (``kvgate_envoy.proto`` says which part of Envoy's API they are). A server
registers its handlers under the names below with ``grpc.method_handlers_generic_handler(SERVICE, {METHOD: …})``.
Knows nothing of decisions.
"""

from __future__ import annotations

from extproc.wire import kvgate_envoy_pb2 as pb

#: Bidirectional stream of ``pb.ProcessingRequest`` -> ``pb.ProcessingResponse``, one per HTTP request.
EXT_PROC_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
EXT_PROC_PROCESS = "Process"

#: Client stream of ``pb.StreamAccessLogsMessage`` -> one ``pb.StreamAccessLogsResponse``, one per worker and logger.
ACCESS_LOG_SERVICE = "envoy.service.accesslog.v3.AccessLogService"
ACCESS_LOG_STREAM = "StreamAccessLogs"

#: ``pb.HealthCheckRequest`` -> ``pb.HealthCheckResponse`` (Check: unary, Watch: server stream).
HEALTH_SERVICE = "grpc.health.v1.Health"
HEALTH_CHECK = "Check"
HEALTH_WATCH = "Watch"

__all__ = [
    "ACCESS_LOG_SERVICE",
    "ACCESS_LOG_STREAM",
    "EXT_PROC_PROCESS",
    "EXT_PROC_SERVICE",
    "HEALTH_CHECK",
    "HEALTH_SERVICE",
    "HEALTH_WATCH",
    "pb",
]
