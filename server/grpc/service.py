"""The RPCs of ``inference.GRPCInferenceService``."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import wraps
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.decoding.decoder import Decoder
from trimaran.server.grpc.messages import InferMessage, LoadMessage, fill_response, utf8
from trimaran.server.grpc.status import CallStatus, Context
from trimaran.server.grpc.stream import GRPC_STOPPING, StreamSession
from trimaran.server.inference.cooperative import run_cooperatively
from trimaran.server.inference.forwarded_headers import HeaderForwarding
from trimaran.server.inference.metadata import metadata_message, server_metadata
from trimaran.server.protocol.load_request import (
    refuse_repository_name,
    unload_dependents_of_grpc,
)
from trimaran.server.protocol.region_json import check_handle
from trimaran.server.service import INTERNAL, Service
from trimaran.server.settings import FORMATS, log_file_refused
from trimaran.server.shared_memory.region_specs import RegionSpec

logger = logging.getLogger(__name__)

DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"

_Method = Callable[[Any, Any, Context], Awaitable[Any]]


def _rpc(method: _Method) -> _Method:
    """Turn a method's errors into the call's status."""

    @wraps(method)
    async def call(self: Any, request: Any, context: Context) -> Any:
        try:
            return await method(self, request, context)
        except RequestError as error:
            CallStatus.of_error(error).set(context)
        except grpc.aio.UsageError:
            raise
        except Exception:
            logger.exception("gRPC %s failed", method.__name__)
            CallStatus(grpc.StatusCode.INTERNAL, INTERNAL).set(context)
        return None

    return call


class InferenceServicer(service_pb2_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Clients that only read settings send no changes."""

    def __init__(self, service: Service, decoder: Decoder) -> None:
        self._service = service
        self._decoder = decoder
        pattern = service.config.grpc_header_forward_pattern
        self._forwarding = HeaderForwarding("--grpc-header-forward-pattern", pattern)

    @_rpc
    async def ServerLive(
        self, request: pb.ServerLiveRequest, context: Context
    ) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @_rpc
    async def ServerReady(
        self, request: pb.ServerReadyRequest, context: Context
    ) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._service.is_ready)

    @_rpc
    async def ModelReady(
        self, request: pb.ModelReadyRequest, context: Context
    ) -> pb.ModelReadyResponse:
        ready = self._service.registry.is_model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    @_rpc
    async def ServerMetadata(
        self, request: pb.ServerMetadataRequest, context: Context
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**server_metadata(self._service.config.server_id))

    @_rpc
    async def ModelMetadata(
        self, request: pb.ModelMetadataRequest, context: Context
    ) -> pb.ModelMetadataResponse:
        registry = self._service.registry
        model = registry.get_ready(request.name, request.version)
        versions = [model.version] if request.version else registry.ready_versions(request.name)
        return metadata_message(model, versions)

    @_rpc
    async def ModelConfig(
        self, request: pb.ModelConfigRequest, context: Context
    ) -> pb.ModelConfigResponse:
        model = self._service.registry.get(request.name, request.version)
        return pb.ModelConfigResponse(config=self._service.model_config(model))

    @_rpc
    async def ModelStatistics(
        self, request: pb.ModelStatisticsRequest, context: Context
    ) -> pb.ModelStatisticsResponse:
        return await self._service.statistics(request.name, request.version)

    @_rpc
    async def ModelInfer(
        self, request: InferMessage, context: Context
    ) -> pb.ModelInferResponse:
        arrival_ns = time.monotonic_ns()
        service = self._service
        with service.admission.admit(GRPC_STOPPING), service.admission.unless_aborted():
            names = request.names
            model = service.registry.get_ready(names.model_name, names.model_version)
            if model.is_decoupled:
                raise RequestError(DECOUPLED, ErrorKind.UNSUPPORTED)
            parsed = await request.parse(self._decoder)
            parsed.request.model_version = names.model_version
            parsed.request.arrival_ns = arrival_ns
            self._forwarding.apply(parsed.request, context.invocation_metadata() or ())
            await service.find_slices(parsed, service.config.grpc_max_message_bytes)
            response = await service.infer_once(model, parsed)
            message = pb.ModelInferResponse()
            await run_cooperatively(fill_response(message, response, parsed.targets))
            sent = service.admission.sending()
            context.add_done_callback(lambda _: sent())
            return message

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[InferMessage], context: Context
    ) -> None:
        session = StreamSession(self._service, self._decoder, self._forwarding, context)
        status = await session.run(request_iterator)
        if status is not None:
            status.set(context)

    @_rpc
    async def RepositoryIndex(
        self, request: pb.RepositoryIndexRequest, context: Context
    ) -> pb.RepositoryIndexResponse:
        refuse_repository_name(request.repository_name)
        response = pb.RepositoryIndexResponse()
        for entry in await self._service.index(request.ready):
            response.models.add(
                name=utf8(entry.name),
                version=entry.version,
                state=entry.state,
                reason=utf8(entry.reason),
            )
        return response

    @_rpc
    async def RepositoryModelLoad(
        self, request: LoadMessage, context: Context
    ) -> pb.RepositoryModelLoadResponse:
        if request.is_long:
            self._service.check_control()
        await self._service.load(await request.parse(self._decoder))
        return pb.RepositoryModelLoadResponse()

    @_rpc
    async def RepositoryModelUnload(
        self, request: pb.RepositoryModelUnloadRequest, context: Context
    ) -> pb.RepositoryModelUnloadResponse:
        refuse_repository_name(request.repository_name)
        unload_dependents = unload_dependents_of_grpc(request.parameters)
        await self._service.unload(request.model_name, unload_dependents=unload_dependents)
        return pb.RepositoryModelUnloadResponse()

    @_rpc
    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest, context: Context
    ) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for spec in self._service.regions.status("system", request.name):
            region = response.regions[spec.name]
            region.name, region.key = spec.name, spec.key
            region.offset, region.byte_size = spec.offset, spec.num_bytes
        return response

    @_rpc
    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest, context: Context
    ) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for spec in self._service.regions.status("cuda", request.name):
            region = response.regions[spec.name]
            region.name = spec.name
            region.device_id, region.byte_size = spec.device_id, spec.num_bytes
        return response

    @_rpc
    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest, context: Context
    ) -> pb.SystemSharedMemoryRegisterResponse:
        spec = RegionSpec(
            kind="system",
            name=request.name,
            key=request.key,
            offset=request.offset,
            num_bytes=request.byte_size,
        )
        await self._service.register_region(spec)
        return pb.SystemSharedMemoryRegisterResponse()

    @_rpc
    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest, context: Context
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await self._service.unregister_region("system", request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    @_rpc
    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest, context: Context
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._service.regions.check_allowed()
        spec = RegionSpec(
            kind="cuda",
            name=request.name,
            raw_handle=check_handle(request.raw_handle),
            device_id=request.device_id,
            num_bytes=request.byte_size,
        )
        await self._service.register_region(spec)
        return pb.CudaSharedMemoryRegisterResponse()

    @_rpc
    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest, context: Context
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        await self._service.unregister_region("cuda", request.name)
        return pb.CudaSharedMemoryUnregisterResponse()

    @_rpc
    async def TraceSetting(
        self, request: pb.TraceSettingRequest, context: Context
    ) -> pb.TraceSettingResponse:
        service, model = self._service, request.model_name
        service.check_traced(model)
        changes = {name: list(each.value) for name, each in request.settings.items()}
        # Clients that only read settings send no changes.
        if changes:
            await service.change_trace_settings(model, changes)
        response = pb.TraceSettingResponse()
        for name, value in service.trace_settings.values(model).items():
            response.settings[name].value.extend(value)
        return response

    @_rpc
    async def LogSettings(
        self, request: pb.LogSettingsRequest, context: Context
    ) -> pb.LogSettingsResponse:
        settings = self._service.log_settings
        known = settings.values()
        changes = {
            name: _log_value(name, each)
            for name, each in request.settings.items()
            if name in known
        }
        # Most calls read the settings and change none.
        if changes:
            await self._service.change_log_settings(changes)
        response = pb.LogSettingsResponse()
        for name, value in settings.values().items():
            if isinstance(value, bool):
                response.settings[name].bool_param = value
            elif isinstance(value, int):
                response.settings[name].uint32_param = value
            else:
                response.settings[name].string_param = value
        return response


def _log_value(name: str, value: pb.LogSettingsRequest.SettingValue) -> Any:
    kind = value.WhichOneof("parameter_choice")
    if name == "log_file":
        raise log_file_refused()
    wanted, word = {
        "log_format": ("string_param", "string"),
        "log_verbose_level": ("uint32_param", "int32"),
    }.get(name, ("bool_param", "boolean"))
    if kind != wanted:
        raise RequestError(f"expect {word} for '{name}'")
    if name == "log_format" and value.string_param not in FORMATS:
        raise RequestError(f"invalid argument for log_format, got: {value.string_param}")
    return getattr(value, kind)
