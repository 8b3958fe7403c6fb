//! Messages of the Container Storage Interface, version 1.13 (csi.proto), as far as the driver reads or
//! writes them. Field numbers are those of the specification; unknown fields are skipped.
//!
//! A `oneof` of messages is written as one optional field for each of its cases, which has the same bytes.

use std::collections::BTreeMap;

/// Message without fields that the driver reads or writes.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct Empty {}

// Identity service.

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetPluginInfoResponse {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) vendor_version: String,
}

/// `Service` or `VolumeExpansion` with its type.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct CapabilityType {
    #[prost(int32, tag = "1")]
    pub(crate) kind: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct PluginCapability {
    #[prost(message, optional, tag = "1")]
    pub(crate) service: Option<CapabilityType>,
    #[prost(message, optional, tag = "2")]
    pub(crate) volume_expansion: Option<CapabilityType>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetPluginCapabilitiesResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) capabilities: Vec<PluginCapability>,
}

/// `google.protobuf.BoolValue`.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct BoolValue {
    #[prost(bool, tag = "1")]
    pub(crate) value: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ProbeResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) ready: Option<BoolValue>,
}

/// `ControllerServiceCapability`, `NodeServiceCapability` and `GroupControllerServiceCapability`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ServiceCapability {
    #[prost(message, optional, tag = "1")]
    pub(crate) rpc: Option<CapabilityType>,
}

/// Response of the three `GetCapabilities` calls of services.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ServiceCapabilities {
    #[prost(message, repeated, tag = "1")]
    pub(crate) capabilities: Vec<ServiceCapability>,
}

impl ServiceCapabilities {
    pub(crate) fn new(kinds: &[i32]) -> Self {
        let capability = |kind| ServiceCapability { rpc: Some(CapabilityType { kind }) };
        Self { capabilities: kinds.iter().copied().map(capability).collect() }
    }
}

// What several messages have.

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct MountVolume {
    #[prost(string, tag = "1")]
    pub(crate) fs_type: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) mount_flags: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct AccessMode {
    #[prost(enumeration = "Mode", tag = "1")]
    pub(crate) mode: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Mode {
    Unknown = 0,
    SingleNodeWriter = 1,
    SingleNodeReaderOnly = 2,
    MultiNodeReaderOnly = 3,
    MultiNodeSingleWriter = 4,
    MultiNodeMultiWriter = 5,
    SingleNodeSingleWriter = 6,
    SingleNodeMultiWriter = 7,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeCapability {
    #[prost(message, optional, tag = "1")]
    pub(crate) block: Option<Empty>,
    #[prost(message, optional, tag = "2")]
    pub(crate) mount: Option<MountVolume>,
    #[prost(message, optional, tag = "3")]
    pub(crate) access_mode: Option<AccessMode>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct CapacityRange {
    #[prost(int64, tag = "1")]
    pub(crate) required_bytes: i64,
    #[prost(int64, tag = "2")]
    pub(crate) limit_bytes: i64,
}

/// `SnapshotSource` or `VolumeSource`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct SourceId {
    #[prost(string, tag = "1")]
    pub(crate) id: String,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct VolumeContentSource {
    #[prost(message, optional, tag = "1")]
    pub(crate) snapshot: Option<SourceId>,
    #[prost(message, optional, tag = "2")]
    pub(crate) volume: Option<SourceId>,
}

#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct Topology {
    #[prost(btree_map = "string, string", tag = "1")]
    pub(crate) segments: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct TopologyRequirement {
    #[prost(message, repeated, tag = "1")]
    pub(crate) requisite: Vec<Topology>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) preferred: Vec<Topology>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Volume {
    #[prost(int64, tag = "1")]
    pub(crate) capacity_bytes: i64,
    #[prost(string, tag = "2")]
    pub(crate) volume_id: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) content_source: Option<VolumeContentSource>,
    #[prost(message, repeated, tag = "5")]
    pub(crate) accessible_topology: Vec<Topology>,
}

/// `google.protobuf.Timestamp`.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct Timestamp {
    #[prost(int64, tag = "1")]
    pub(crate) seconds: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Snapshot {
    #[prost(int64, tag = "1")]
    pub(crate) size_bytes: i64,
    #[prost(string, tag = "2")]
    pub(crate) snapshot_id: String,
    #[prost(string, tag = "3")]
    pub(crate) source_volume_id: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) creation_time: Option<Timestamp>,
    #[prost(bool, tag = "5")]
    pub(crate) ready_to_use: bool,
    #[prost(string, tag = "6")]
    pub(crate) group_snapshot_id: String,
    #[prost(message, repeated, tag = "7")]
    pub(crate) accessible_topology: Vec<Topology>,
}

// Controller service.

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CreateVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) capacity_range: Option<CapacityRange>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) volume_capabilities: Vec<VolumeCapability>,
    #[prost(btree_map = "string, string", tag = "4")]
    pub(crate) parameters: BTreeMap<String, String>,
    #[prost(message, optional, tag = "6")]
    pub(crate) volume_content_source: Option<VolumeContentSource>,
    #[prost(message, optional, tag = "7")]
    pub(crate) accessibility_requirements: Option<TopologyRequirement>,
    #[prost(btree_map = "string, string", tag = "8")]
    pub(crate) mutable_parameters: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CreateVolumeResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) volume: Option<Volume>,
}

/// Request that names a volume in its first field and nothing else that the driver reads.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeIdRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ControllerPublishVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "2")]
    pub(crate) node_id: String,
    #[prost(message, optional, tag = "3")]
    pub(crate) volume_capability: Option<VolumeCapability>,
    #[prost(bool, tag = "4")]
    pub(crate) readonly: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ControllerPublishVolumeResponse {
    #[prost(btree_map = "string, string", tag = "1")]
    pub(crate) publish_context: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ControllerUnpublishVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "2")]
    pub(crate) node_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ValidateVolumeCapabilitiesRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub(crate) volume_context: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) volume_capabilities: Vec<VolumeCapability>,
    #[prost(btree_map = "string, string", tag = "4")]
    pub(crate) parameters: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "6")]
    pub(crate) mutable_parameters: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ConfirmedCapabilities {
    #[prost(btree_map = "string, string", tag = "1")]
    pub(crate) volume_context: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) volume_capabilities: Vec<VolumeCapability>,
    #[prost(btree_map = "string, string", tag = "3")]
    pub(crate) parameters: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "4")]
    pub(crate) mutable_parameters: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ValidateVolumeCapabilitiesResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) confirmed: Option<ConfirmedCapabilities>,
    #[prost(string, tag = "2")]
    pub(crate) message: String,
}

/// `ListVolumesRequest` and `ControllerListVolumeHealthRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListRequest {
    #[prost(int32, tag = "1")]
    pub(crate) max_entries: i32,
    #[prost(string, tag = "2")]
    pub(crate) starting_token: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeStatus {
    #[prost(string, repeated, tag = "1")]
    pub(crate) published_node_ids: Vec<String>,
}

/// Entry of a list of volumes, and `ControllerGetVolumeResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeEntry {
    #[prost(message, optional, tag = "1")]
    pub(crate) volume: Option<Volume>,
    #[prost(message, optional, tag = "2")]
    pub(crate) status: Option<VolumeStatus>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListVolumesResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<VolumeEntry>,
    #[prost(string, tag = "2")]
    pub(crate) next_token: String,
}

/// Type of a volume's health error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum HealthError {
    Unknown = 0,
    Degraded = 1,
    Inaccessible = 2,
    DataLoss = 3,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HealthEntry {
    #[prost(enumeration = "HealthError", tag = "1")]
    pub(crate) status: i32,
    #[prost(string, tag = "2")]
    pub(crate) reason: String,
    #[prost(string, tag = "3")]
    pub(crate) message: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeHealth {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) health_statuses: Vec<HealthEntry>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListVolumeHealthResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<VolumeHealth>,
    #[prost(string, tag = "2")]
    pub(crate) next_token: String,
}

/// `ControllerGetVolumeHealthResponse` and `NodeGetVolumeHealthResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeHealthResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) volume_health: Option<VolumeHealth>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct GetCapacityRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) volume_capabilities: Vec<VolumeCapability>,
    #[prost(btree_map = "string, string", tag = "2")]
    pub(crate) parameters: BTreeMap<String, String>,
    #[prost(message, optional, tag = "3")]
    pub(crate) accessible_topology: Option<Topology>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct GetCapacityResponse {
    #[prost(int64, tag = "1")]
    pub(crate) available_capacity: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CreateSnapshotRequest {
    #[prost(string, tag = "1")]
    pub(crate) source_volume_id: String,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    #[prost(btree_map = "string, string", tag = "4")]
    pub(crate) parameters: BTreeMap<String, String>,
    #[prost(message, optional, tag = "5")]
    pub(crate) accessibility_requirements: Option<TopologyRequirement>,
}

/// `CreateSnapshotResponse`, `GetSnapshotResponse` and entry of a list of snapshots.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SnapshotEntry {
    #[prost(message, optional, tag = "1")]
    pub(crate) snapshot: Option<Snapshot>,
}

/// `DeleteSnapshotRequest` and `GetSnapshotRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SnapshotIdRequest {
    #[prost(string, tag = "1")]
    pub(crate) snapshot_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListSnapshotsRequest {
    #[prost(int32, tag = "1")]
    pub(crate) max_entries: i32,
    #[prost(string, tag = "2")]
    pub(crate) starting_token: String,
    #[prost(string, tag = "3")]
    pub(crate) source_volume_id: String,
    #[prost(string, tag = "4")]
    pub(crate) snapshot_id: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ListSnapshotsResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) entries: Vec<SnapshotEntry>,
    #[prost(string, tag = "2")]
    pub(crate) next_token: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ControllerExpandVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(message, optional, tag = "2")]
    pub(crate) capacity_range: Option<CapacityRange>,
    #[prost(message, optional, tag = "4")]
    pub(crate) volume_capability: Option<VolumeCapability>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct ControllerExpandVolumeResponse {
    #[prost(int64, tag = "1")]
    pub(crate) capacity_bytes: i64,
    #[prost(bool, tag = "2")]
    pub(crate) node_expansion_required: bool,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct ControllerModifyVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(btree_map = "string, string", tag = "3")]
    pub(crate) mutable_parameters: BTreeMap<String, String>,
}

// Group controller service.

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct CreateVolumeGroupSnapshotRequest {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) source_volume_ids: Vec<String>,
    #[prost(btree_map = "string, string", tag = "4")]
    pub(crate) parameters: BTreeMap<String, String>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeGroupSnapshot {
    #[prost(string, tag = "1")]
    pub(crate) group_snapshot_id: String,
    #[prost(message, repeated, tag = "2")]
    pub(crate) snapshots: Vec<Snapshot>,
    #[prost(message, optional, tag = "3")]
    pub(crate) creation_time: Option<Timestamp>,
    #[prost(bool, tag = "4")]
    pub(crate) ready_to_use: bool,
}

/// `CreateVolumeGroupSnapshotResponse` and `GetVolumeGroupSnapshotResponse`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeGroupSnapshotResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) group_snapshot: Option<VolumeGroupSnapshot>,
}

/// `DeleteVolumeGroupSnapshotRequest` and `GetVolumeGroupSnapshotRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct VolumeGroupSnapshotIdRequest {
    #[prost(string, tag = "1")]
    pub(crate) group_snapshot_id: String,
    #[prost(string, repeated, tag = "2")]
    pub(crate) snapshot_ids: Vec<String>,
}

// Node service.

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeStageVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(btree_map = "string, string", tag = "2")]
    pub(crate) publish_context: BTreeMap<String, String>,
    #[prost(string, tag = "3")]
    pub(crate) staging_target_path: String,
    #[prost(message, optional, tag = "4")]
    pub(crate) volume_capability: Option<VolumeCapability>,
}

/// `NodeUnstageVolumeRequest` and `NodeUnpublishVolumeRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodePathRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "2")]
    pub(crate) path: String,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodePublishVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "3")]
    pub(crate) staging_target_path: String,
    #[prost(string, tag = "4")]
    pub(crate) target_path: String,
    #[prost(message, optional, tag = "5")]
    pub(crate) volume_capability: Option<VolumeCapability>,
    #[prost(bool, tag = "6")]
    pub(crate) readonly: bool,
}

/// `NodeGetVolumeStatsRequest` and `NodeGetVolumeHealthRequest`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeGetVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "2")]
    pub(crate) volume_path: String,
}

/// Unit of a volume's usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum UsageUnit {
    Unknown = 0,
    Bytes = 1,
    Inodes = 2,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct VolumeUsage {
    #[prost(int64, tag = "1")]
    pub(crate) available: i64,
    #[prost(int64, tag = "2")]
    pub(crate) total: i64,
    #[prost(int64, tag = "3")]
    pub(crate) used: i64,
    #[prost(enumeration = "UsageUnit", tag = "4")]
    pub(crate) unit: i32,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeGetVolumeStatsResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) usage: Vec<VolumeUsage>,
}

/// `NodeGetStorageHealthResponse`; the type of an error is 2, unreachable.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeGetStorageHealthResponse {
    #[prost(message, repeated, tag = "1")]
    pub(crate) backend_health: Vec<HealthEntry>,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeExpandVolumeRequest {
    #[prost(string, tag = "1")]
    pub(crate) volume_id: String,
    #[prost(string, tag = "2")]
    pub(crate) volume_path: String,
    #[prost(message, optional, tag = "3")]
    pub(crate) capacity_range: Option<CapacityRange>,
    #[prost(message, optional, tag = "5")]
    pub(crate) volume_capability: Option<VolumeCapability>,
}

#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(crate) struct NodeExpandVolumeResponse {
    #[prost(int64, tag = "1")]
    pub(crate) capacity_bytes: i64,
}

#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct NodeGetInfoResponse {
    #[prost(string, tag = "1")]
    pub(crate) node_id: String,
    #[prost(int64, tag = "2")]
    pub(crate) max_volumes_per_node: i64,
    #[prost(message, optional, tag = "3")]
    pub(crate) accessible_topology: Option<Topology>,
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    #[test]
    fn case_of_a_oneof_has_the_bytes_of_an_optional_field() {
        // csi.v1.VolumeCapability { mount { fs_type: "xfs" } access_mode { mode: SINGLE_NODE_WRITER } },
        // by the wire format: field 2 with length 5, of which field 1 is "xfs"; field 3 with length 2.
        let bytes = [0x12, 5, 0x0a, 3, b'x', b'f', b's', 0x1a, 2, 8, 1];
        let capability = VolumeCapability {
            block: None,
            mount: Some(MountVolume { fs_type: "xfs".into(), mount_flags: vec![] }),
            access_mode: Some(AccessMode { mode: Mode::SingleNodeWriter as i32 }),
        };
        assert_eq!(capability.encode_to_vec(), bytes);
        assert_eq!(VolumeCapability::decode(&bytes[..]), Ok(capability));
    }
}
