//! Dispatch: the services of the Container Storage Interface by the paths of their methods.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use prost::Message;
use tenmil_rpc::ControlEndpoint;

use crate::api_client::ApiClient;
use crate::controller::{Controller, ControllerOptions};
use crate::grpc::CallHandler;
use crate::linux_node::LinuxNode;
use crate::messages::{
    BoolValue, CapabilityType, ControllerExpandVolumeRequest, ControllerModifyVolumeRequest,
    ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, CreateSnapshotRequest,
    CreateVolumeGroupSnapshotRequest, CreateVolumeRequest, Empty, GetCapacityRequest,
    GetPluginCapabilitiesResponse, GetPluginInfoResponse, ListRequest, ListSnapshotsRequest,
    NodeExpandVolumeRequest, NodeGetVolumeRequest, NodePathRequest, NodePublishVolumeRequest,
    NodeStageVolumeRequest, PluginCapability, ProbeResponse, ServiceCapabilities,
    SnapshotIdRequest, ValidateVolumeCapabilitiesRequest, VolumeGroupSnapshotIdRequest,
    VolumeIdRequest,
};
use crate::node::{Node, NodeOptions};
use crate::status::{CallResult, Code, Status};

/// Name of the driver, as storage classes have it.
pub(crate) const DRIVER_NAME: &str = "csi.tenmil.org";

/// Services of this process.
pub(crate) struct Services {
    pub(crate) controller: Option<ControllerService>,
    pub(crate) node: Option<NodeService>,
    pub(crate) calls: CallsInProgress,
}

/// Controller service with its storage server.
pub(crate) struct ControllerService {
    pub(crate) endpoint: ControlEndpoint,
    pub(crate) options: ControllerOptions,
}

/// Node service with its system.
pub(crate) struct NodeService {
    pub(crate) system: LinuxNode,
    pub(crate) options: NodeOptions,
}

/// Volumes, snapshots and new names that calls in progress have: a second call for one of them is refused, and
/// repeated by the orchestrator.
#[derive(Debug, Default)]
pub(crate) struct CallsInProgress(Mutex<BTreeSet<String>>);

/// Call of the controller.
struct ControllerCall<'a> {
    service: &'a ControllerService,
    calls: &'a CallsInProgress,
    message: &'a [u8],
}

/// Object of a call in progress.
#[derive(Debug)]
struct CallInProgress<'a> {
    calls: &'a CallsInProgress,
    object: String,
}

/// Capabilities of the plugin: controller service and group controller service.
const PLUGIN_SERVICES: [i32; 2] = [1, 3];
/// Accessibility constraints of volumes.
const ACCESSIBILITY_SERVICES: [i32; 1] = [2];
/// Volumes are expanded while they are in use.
const EXPANSION_ONLINE: i32 = 1;
/// Create and delete, publish, list, capacity, snapshots, list of snapshots, clone, read-only publish, expand,
/// list of nodes, get, single-node multi-writer, modify, get of a snapshot, health, list of health.
const CONTROLLER: [i32; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17];
/// Create, delete and get of group snapshots.
const GROUP_CONTROLLER: [i32; 1] = [1];
/// Stage, statistics, expand, single-node multi-writer, health of volumes and of storage.
const NODE: [i32; 6] = [1, 2, 3, 5, 7, 8];

impl CallHandler for Services {
    fn call(&self, path: &str, message: &[u8]) -> Result<Vec<u8>, Status> {
        let unknown = || Status::new(Code::Unimplemented, format!("{path}: not implemented"));
        let (service, method) = path
            .strip_prefix("/csi.v1.")
            .and_then(|rest| rest.split_once('/'))
            .ok_or_else(unknown)?;
        match (service, &self.controller, &self.node) {
            ("Identity", ..) => self.identity(method).unwrap_or_else(|| Err(unknown())),
            ("Controller" | "GroupController", Some(controller), _) => {
                let done = controller.call(&self.calls, (service, method), message);
                done.unwrap_or_else(|| Err(unknown()))
            }
            ("Node", _, Some(node)) => {
                let done = node.call(&self.calls, method, message);
                done.unwrap_or_else(|| Err(unknown()))
            }
            _ => Err(unknown()),
        }
    }
}

impl Services {
    fn identity(&self, method: &str) -> Option<CallResult<Vec<u8>>> {
        let service = |kind| PluginCapability {
            service: Some(CapabilityType { kind }),
            volume_expansion: None,
        };
        Some(match method {
            "GetPluginInfo" => answer(Ok(GetPluginInfoResponse {
                name: DRIVER_NAME.to_owned(),
                vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            })),
            "GetPluginCapabilities" => {
                let of_controller = self.controller.as_ref().map(|it| &it.options.topology);
                let of_node = self.node.as_ref().map(|it| &it.options.topology);
                let is_somewhere = |it: Option<&std::collections::BTreeMap<_, _>>| {
                    it.is_some_and(|topology| !topology.is_empty())
                };
                let accessibility = match is_somewhere(of_controller) || is_somewhere(of_node) {
                    true => &ACCESSIBILITY_SERVICES[..],
                    false => &[],
                };
                let services = PLUGIN_SERVICES.iter().chain(accessibility).copied().map(service);
                let expansion = PluginCapability {
                    service: None,
                    volume_expansion: Some(CapabilityType { kind: EXPANSION_ONLINE }),
                };
                let capabilities = services.chain([expansion]).collect();
                answer(Ok(GetPluginCapabilitiesResponse { capabilities }))
            }
            "Probe" => answer(self.probe()),
            _ => return None,
        })
    }

    /// Whether the storage server is reached, and whether a node can attach volumes.
    fn probe(&self) -> CallResult<ProbeResponse> {
        if let Some(controller) = &self.controller {
            ApiClient::connect(&controller.endpoint)?;
        }
        if let Some(node) = &self.node {
            use crate::node_system::NodeSystem as _;
            if let Some(problem) = node.system.clone().attachment_problem() {
                return Err(Status::failed_precondition(problem));
            }
        }
        Ok(ProbeResponse { ready: Some(BoolValue { value: true }) })
    }
}

impl ControllerService {
    /// `None` if there is no such method.
    fn call(
        &self,
        calls: &CallsInProgress,
        (service, method): (&str, &str),
        message: &[u8],
    ) -> Option<CallResult<Vec<u8>>> {
        let call = ControllerCall { service: self, calls, message };
        if service == "GroupController" {
            return call.group_method(method);
        }
        let volume = |it: &VolumeIdRequest| it.volume_id.clone();
        let snapshot = |it: &SnapshotIdRequest| it.snapshot_id.clone();
        let none = |_: &ListRequest| String::new();
        Some(match method {
            "ControllerGetCapabilities" => answer(Ok(ServiceCapabilities::new(&CONTROLLER))),
            "CreateVolume" => {
                let object = |it: &CreateVolumeRequest| it.name.clone();
                call.run(object, |controller, it| controller.create_volume(&it))
            }
            "DeleteVolume" => call.run(volume, |controller, it| {
                controller.delete_volume(&it.volume_id).map(|()| Empty {})
            }),
            "ControllerPublishVolume" => {
                let object = |it: &ControllerPublishVolumeRequest| it.volume_id.clone();
                call.run(object, |controller, it| controller.publish_volume(&it))
            }
            "ControllerUnpublishVolume" => {
                let object = |it: &ControllerUnpublishVolumeRequest| it.volume_id.clone();
                call.run(object, |controller, it| {
                    controller.unpublish_volume(&it).map(|()| Empty {})
                })
            }
            "ValidateVolumeCapabilities" => {
                let object = |_: &ValidateVolumeCapabilitiesRequest| String::new();
                call.run(object, |controller, it| controller.validate_capabilities(it))
            }
            "ListVolumes" => call.run(none, |controller, it| controller.list_volumes(&it)),
            "ControllerListVolumeHealth" => {
                call.run(none, |controller, it| controller.list_volume_health(&it))
            }
            "ControllerGetVolumeHealth" => {
                let object = |_: &VolumeIdRequest| String::new();
                call.run(object, |controller, it| controller.volume_health(&it.volume_id))
            }
            "ControllerGetVolume" => {
                let object = |_: &VolumeIdRequest| String::new();
                call.run(object, |controller, it| controller.get_volume(&it.volume_id))
            }
            "GetCapacity" => {
                let object = |_: &GetCapacityRequest| String::new();
                call.run(object, |controller, it| controller.get_capacity(&it))
            }
            "CreateSnapshot" => {
                let object = |it: &CreateSnapshotRequest| it.name.clone();
                call.run(object, |controller, it| controller.create_snapshot(&it))
            }
            "DeleteSnapshot" => call.run(snapshot, |controller, it| {
                controller.delete_snapshot(&it.snapshot_id).map(|()| Empty {})
            }),
            "GetSnapshot" => {
                let object = |_: &SnapshotIdRequest| String::new();
                call.run(object, |controller, it| controller.get_snapshot(&it.snapshot_id))
            }
            "ListSnapshots" => {
                let object = |_: &ListSnapshotsRequest| String::new();
                call.run(object, |controller, it| controller.list_snapshots(&it))
            }
            "ControllerExpandVolume" => {
                let object = |it: &ControllerExpandVolumeRequest| it.volume_id.clone();
                call.run(object, |controller, it| controller.expand_volume(&it))
            }
            "ControllerModifyVolume" => {
                let object = |it: &ControllerModifyVolumeRequest| it.volume_id.clone();
                call.run(object, |controller, it| controller.modify_volume(&it).map(|()| Empty {}))
            }
            _ => return None,
        })
    }
}

impl ControllerCall<'_> {
    fn group_method(&self, method: &str) -> Option<CallResult<Vec<u8>>> {
        let group = |it: &VolumeGroupSnapshotIdRequest| it.group_snapshot_id.clone();
        Some(match method {
            "GroupControllerGetCapabilities" => {
                answer(Ok(ServiceCapabilities::new(&GROUP_CONTROLLER)))
            }
            "CreateVolumeGroupSnapshot" => {
                let object = |it: &CreateVolumeGroupSnapshotRequest| it.name.clone();
                self.run(object, |controller, it| controller.create_group_snapshot(&it))
            }
            "DeleteVolumeGroupSnapshot" => self.run(group, |controller, it| {
                controller.delete_group_snapshot(&it).map(|()| Empty {})
            }),
            "GetVolumeGroupSnapshot" => {
                let object = |_: &VolumeGroupSnapshotIdRequest| String::new();
                self.run(object, |controller, it| controller.get_group_snapshot(&it))
            }
            _ => return None,
        })
    }

    /// Decodes the request, connects to the server and runs the method. While it runs, no other call has the same
    /// object, unless that is empty.
    fn run<R: Message + Default, T: Message>(
        &self,
        object: impl FnOnce(&R) -> String,
        method: impl FnOnce(&mut Controller<'_, ApiClient>, R) -> CallResult<T>,
    ) -> CallResult<Vec<u8>> {
        let request = decode::<R>(self.message)?;
        let _claim = self.calls.begin(object(&request))?;
        let ControllerService { endpoint, options } = self.service;
        let mut api = ApiClient::connect(endpoint)?;
        let mut controller = Controller { api: &mut api, options, now_s: now_s() };
        answer(method(&mut controller, request))
    }
}

impl NodeService {
    /// `None` if there is no such method.
    fn call(
        &self,
        calls: &CallsInProgress,
        method: &str,
        message: &[u8],
    ) -> Option<CallResult<Vec<u8>>> {
        let mut system = self.system.clone();
        let mut node = Node { system: &mut system, options: &self.options };
        let claim = |volume: &str| calls.begin(volume.to_owned());
        Some(match method {
            "NodeGetCapabilities" => answer(Ok(ServiceCapabilities::new(&NODE))),
            "NodeGetInfo" => answer(Ok(node.info())),
            "NodeStageVolume" => decode::<NodeStageVolumeRequest>(message).and_then(|it| {
                let _claim = claim(&it.volume_id)?;
                answer(node.stage_volume(&it).map(|()| Empty {}))
            }),
            "NodeUnstageVolume" => decode::<NodePathRequest>(message).and_then(|it| {
                let _claim = claim(&it.volume_id)?;
                answer(node.unstage_volume(&it).map(|()| Empty {}))
            }),
            "NodePublishVolume" => decode::<NodePublishVolumeRequest>(message).and_then(|it| {
                let _claim = claim(&it.volume_id)?;
                answer(node.publish_volume(&it).map(|()| Empty {}))
            }),
            "NodeUnpublishVolume" => decode::<NodePathRequest>(message).and_then(|it| {
                let _claim = claim(&it.volume_id)?;
                answer(node.unpublish_volume(&it).map(|()| Empty {}))
            }),
            "NodeExpandVolume" => decode::<NodeExpandVolumeRequest>(message).and_then(|it| {
                let _claim = claim(&it.volume_id)?;
                answer(node.expand_volume(&it))
            }),
            "NodeGetVolumeStats" => decode::<NodeGetVolumeRequest>(message)
                .and_then(|it| answer(node.volume_stats(&it))),
            "NodeGetVolumeHealth" => decode::<NodeGetVolumeRequest>(message)
                .and_then(|it| answer(node.volume_health(&it))),
            "NodeGetStorageHealth" => answer(Ok(node.storage_health())),
            _ => return None,
        })
    }
}

impl CallsInProgress {
    /// Begins a call for an object; without one it needs none.
    fn begin(&self, object: String) -> CallResult<Option<CallInProgress<'_>>> {
        if object.is_empty() {
            return Ok(None);
        }
        if !self.lock().insert(object.clone()) {
            let text = format!("{object}: another call is in progress");
            return Err(Status::new(Code::Aborted, text));
        }
        Ok(Some(CallInProgress { calls: self, object }))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CallInProgress<'_> {
    fn drop(&mut self) {
        self.calls.lock().remove(&self.object);
    }
}

fn decode<R: Message + Default>(message: &[u8]) -> CallResult<R> {
    R::decode(message).map_err(|error| Status::invalid_argument(format!("request: {error}")))
}

fn answer<T: Message>(result: CallResult<T>) -> CallResult<Vec<u8>> {
    result.map(|response| response.encode_to_vec())
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::CallsInProgress;
    use crate::status::Code;

    #[test]
    fn second_call_for_an_object_is_aborted_until_the_first_has_ended() {
        let calls = CallsInProgress::default();
        let first = calls.begin("a".into()).unwrap();
        assert_eq!(calls.begin("a".into()).unwrap_err().code, Code::Aborted);
        assert!(calls.begin("b".into()).is_ok());
        drop(first);
        assert!(calls.begin("a".into()).is_ok());
        assert!(calls.begin(String::new()).unwrap().is_none());
    }
}
