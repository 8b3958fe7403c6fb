//! The controller against a simulated server: every call is cut at every request, and called again.

mod simulated_server;

use std::collections::BTreeMap;

use prost::Message;

use self::simulated_server::{Cut, POOL, SimulatedServer};
use super::{Controller, ControllerOptions, page_of};
use crate::messages::{
    AccessMode, CapacityRange, ControllerExpandVolumeRequest, ControllerModifyVolumeRequest,
    ControllerPublishVolumeRequest, ControllerUnpublishVolumeRequest, CreateSnapshotRequest,
    CreateVolumeGroupSnapshotRequest, CreateVolumeRequest, Empty, GetCapacityRequest, ListRequest,
    ListSnapshotsRequest, Mode, MountVolume, SourceId, Topology, TopologyRequirement,
    VolumeCapability, VolumeContentSource, VolumeGroupSnapshotIdRequest,
};
use crate::names::{GroupId, SnapshotId, VolumeId};
use crate::status::{CallResult, Code};

const NODE: &str = "nqn.2014-08.org.example:node";
const OTHER_NODE: &str = "nqn.2014-08.org.example:other";
const NOW_S: u64 = 1_700_000_000;
const MIB: i64 = 1 << 20;

/// Call of the controller, which returns the bytes of its response.
type Call = Box<dyn Fn(&mut Controller<'_, SimulatedServer>) -> CallResult<Vec<u8>>>;

fn with_controller<T>(
    server: &mut SimulatedServer,
    run: impl FnOnce(&mut Controller<'_, SimulatedServer>) -> T,
) -> T {
    let options = ControllerOptions::default();
    run(&mut Controller { api: server, options: &options, now_s: NOW_S })
}

fn capability(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        block: None,
        mount: Some(MountVolume::default()),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    }
}

fn create(name: &str, required_mib: i64) -> CreateVolumeRequest {
    let required_bytes = required_mib * MIB;
    CreateVolumeRequest {
        name: name.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes, limit_bytes: 0 }),
        volume_capabilities: vec![capability(Mode::SingleNodeWriter)],
        ..CreateVolumeRequest::default()
    }
}

fn clone_of_snapshot(name: &str, snapshot: &SnapshotId, required_mib: i64) -> CreateVolumeRequest {
    let snapshot = Some(SourceId { id: snapshot.to_string() });
    let volume_content_source = Some(VolumeContentSource { snapshot, volume: None });
    CreateVolumeRequest { volume_content_source, ..create(name, required_mib) }
}

fn publish(volume: &VolumeId, node: &str, readonly: bool) -> ControllerPublishVolumeRequest {
    ControllerPublishVolumeRequest {
        volume_id: volume.to_string(),
        node_id: node.to_owned(),
        volume_capability: Some(capability(Mode::SingleNodeWriter)),
        readonly,
    }
}

fn snapshot(volume: &VolumeId, name: &str) -> CreateSnapshotRequest {
    CreateSnapshotRequest {
        source_volume_id: volume.to_string(),
        name: name.to_owned(),
        ..CreateSnapshotRequest::default()
    }
}

fn call<R: Message + 'static, T: Message>(
    request: R,
    method: impl Fn(&mut Controller<'_, SimulatedServer>, &R) -> CallResult<T> + 'static,
) -> Call {
    Box::new(move |controller| method(controller, &request).map(|it| it.encode_to_vec()))
}

/// The life of some volumes.
fn calls_of_a_life() -> Vec<(&'static str, Call)> {
    let (a, b) = (VolumeId::new(POOL, "a"), VolumeId::new(POOL, "b"));
    let (monday, group) = (SnapshotId::new(&a, "monday", NOW_S), GroupId::new(POOL, "g", NOW_S));
    let mut with_limits = create("a", 64);
    with_limits.mutable_parameters = [("iops".to_owned(), "500".to_owned())].into();
    let of_volume = CreateVolumeRequest {
        volume_content_source: Some(VolumeContentSource {
            snapshot: None,
            volume: Some(SourceId { id: a.to_string() }),
        }),
        ..create("c", 64)
    };
    let group_request = CreateVolumeGroupSnapshotRequest {
        name: "g".to_owned(),
        source_volume_ids: vec![b.to_string(), a.to_string()],
        ..CreateVolumeGroupSnapshotRequest::default()
    };
    let group_id = VolumeGroupSnapshotIdRequest {
        group_snapshot_id: group.to_string(),
        snapshot_ids: Vec::new(),
    };
    let modify = ControllerModifyVolumeRequest {
        volume_id: a.to_string(),
        mutable_parameters: [("bytes".to_owned(), "1000000".to_owned())].into(),
    };
    let expand = ControllerExpandVolumeRequest {
        volume_id: a.to_string(),
        capacity_range: Some(CapacityRange { required_bytes: 96 * MIB, limit_bytes: 0 }),
        volume_capability: None,
    };
    let unpublish =
        ControllerUnpublishVolumeRequest { volume_id: a.to_string(), node_id: NODE.to_owned() };
    let delete = |volume: &VolumeId| -> Call {
        let id = volume.to_string();
        Box::new(move |it| it.delete_volume(&id).map(|()| Vec::new()))
    };
    let delete_monday = monday.to_string();
    vec![
        ("create with limits", call(with_limits, |it, request| it.create_volume(request))),
        ("publish", call(publish(&a, NODE, false), |it, request| it.publish_volume(request))),
        ("expand", call(expand, |it, request| it.expand_volume(request))),
        ("snapshot", call(snapshot(&a, "monday"), |it, request| it.create_snapshot(request))),
        (
            "larger clone of a snapshot",
            call(clone_of_snapshot("b", &monday, 128), |it, request| it.create_volume(request)),
        ),
        ("clone of a volume", call(of_volume, |it, request| it.create_volume(request))),
        ("group snapshot", call(group_request, |it, request| it.create_group_snapshot(request))),
        ("modify", call(modify, |it, request| it.modify_volume(request).map(|()| Empty {}))),
        (
            "unpublish",
            call(unpublish, |it, request| it.unpublish_volume(request).map(|()| Empty {})),
        ),
        (
            "delete a snapshot with a clone",
            Box::new(move |it| it.delete_snapshot(&delete_monday).map(|()| Vec::new())),
        ),
        ("delete a volume with snapshots", delete(&a)),
        (
            "delete a group",
            call(group_id, |it, request| it.delete_group_snapshot(request).map(|()| Empty {})),
        ),
        ("delete a clone", delete(&b)),
        ("delete another", delete(&VolumeId::new(POOL, "c"))),
    ]
}

#[test]
fn call_that_is_cut_at_any_request_completes_when_it_is_repeated() {
    let mut server = SimulatedServer::new();
    let mut cuts = 0;
    for (name, call) in calls_of_a_life() {
        let before = server.clone();
        let expected =
            with_controller(&mut server, &call).unwrap_or_else(|why| panic!("{name}: {why}"));
        let again = with_controller(&mut server.clone(), &call);
        assert_eq!(again.as_ref(), Ok(&expected), "{name}, repeated");
        for cut in [Cut::Before, Cut::After] {
            for at in 1.. {
                let mut cut_server = before.clone();
                cut_server.cut = Some((at, cut));
                let interrupted = with_controller(&mut cut_server, &call);
                if cut_server.cut.is_some() {
                    assert!(interrupted.is_ok(), "{name}: {interrupted:?}");
                    break;
                }
                cuts += 1;
                let repeated = with_controller(&mut cut_server, &call);
                assert_eq!(repeated.as_ref(), Ok(&expected), "{name}, {cut:?} request {at}");
                assert_eq!(cut_server.state, server.state, "{name}, {cut:?} request {at}");
            }
        }
    }
    assert_eq!(server.state, SimulatedServer::new().state, "everything is deleted");
    assert!(cuts > 100, "{cuts} cuts");
}

#[test]
fn snapshot_keeps_its_time_and_its_source_when_that_is_deleted() {
    let mut server = SimulatedServer::new();
    let a = VolumeId::new(POOL, "a");
    with_controller(&mut server, |it| it.create_volume(&create("a", 1))).unwrap();
    let request = snapshot(&a, "s");
    let first = with_controller(&mut server, |it| it.create_snapshot(&request)).unwrap();
    let options = ControllerOptions::default();
    let mut later = Controller { api: &mut server, options: &options, now_s: NOW_S + 60 };
    assert_eq!(later.create_snapshot(&request), Ok(first.clone()));
    later.delete_volume(&a.to_string()).unwrap();
    let listed = later.list_snapshots(&ListSnapshotsRequest::default()).unwrap();
    assert_eq!(listed.entries, [first]);
    let of_source =
        ListSnapshotsRequest { source_volume_id: a.to_string(), ..ListSnapshotsRequest::default() };
    assert_eq!(later.list_snapshots(&of_source).unwrap().entries.len(), 1);
}

#[test]
fn existing_volume_of_another_kind_is_refused() {
    let mut server = SimulatedServer::new();
    let a = VolumeId::new(POOL, "a");
    let code = |server: &mut SimulatedServer, request: &CreateVolumeRequest| {
        with_controller(server, |it| it.create_volume(request)).map_err(|status| status.code)
    };
    assert!(code(&mut server, &create("a", 64)).is_ok());
    assert_eq!(code(&mut server, &create("a", 65)), Err(Code::AlreadyExists));
    let mut smaller = create("a", 1);
    smaller.capacity_range = Some(CapacityRange { required_bytes: MIB, limit_bytes: 2 * MIB });
    assert_eq!(code(&mut server, &smaller), Err(Code::AlreadyExists));
    with_controller(&mut server, |it| it.create_snapshot(&snapshot(&a, "s"))).unwrap();
    let clone = clone_of_snapshot("a", &SnapshotId::new(&a, "s", NOW_S), 64);
    assert_eq!(code(&mut server, &clone), Err(Code::AlreadyExists));
    let none = clone_of_snapshot("b", &SnapshotId::new(&a, "t", NOW_S), 64);
    assert_eq!(code(&mut server, &none), Err(Code::NotFound));
    // A complete clone does not grow when a larger one is requested.
    let clone = |mib| clone_of_snapshot("b", &SnapshotId::new(&a, "s", NOW_S), mib);
    assert!(code(&mut server, &clone(64)).is_ok());
    assert_eq!(code(&mut server, &clone(128)), Err(Code::AlreadyExists));
}

#[test]
fn data_of_a_deletion_that_did_not_end_are_not_a_new_volume() {
    let mut server = SimulatedServer::new();
    with_controller(&mut server, |it| it.create_volume(&create("a", 64))).unwrap();
    let id = VolumeId::new(POOL, "a");
    server.state.volumes.get_mut(&id.pool_name()).unwrap().used_bytes = 4096;
    server.state.subsystems.clear();
    let refused = with_controller(&mut server, |it| it.create_volume(&create("a", 64)));
    assert_eq!(refused.unwrap_err().code, Code::AlreadyExists);
    with_controller(&mut server, |it| it.delete_volume(&id.to_string())).unwrap();
    assert!(with_controller(&mut server, |it| it.create_volume(&create("a", 64))).is_ok());
}

#[test]
fn sizes_that_cannot_be_are_out_of_range() {
    let mut server = SimulatedServer::new();
    let mut request = create("a", 1);
    request.capacity_range =
        Some(CapacityRange { required_bytes: MIB + 1, limit_bytes: MIB + 4096 });
    let refused = with_controller(&mut server, |it| it.create_volume(&request)).unwrap_err();
    assert_eq!(refused.code, Code::OutOfRange);
    request.capacity_range = Some(CapacityRange { required_bytes: 2, limit_bytes: 1 });
    let refused = with_controller(&mut server, |it| it.create_volume(&request)).unwrap_err();
    assert_eq!(refused.code, Code::InvalidArgument);
    request.capacity_range = Some(CapacityRange { required_bytes: i64::MAX, limit_bytes: 0 });
    let refused = with_controller(&mut server, |it| it.create_volume(&request)).unwrap_err();
    assert_eq!(refused.code, Code::OutOfRange);
    request.capacity_range = None;
    request.parameters = [("thick".to_owned(), "true".to_owned())].into();
    let refused = with_controller(&mut server, |it| it.create_volume(&request)).unwrap_err();
    assert_eq!(refused.code, Code::ResourceExhausted, "more than the pool has");
}

#[test]
fn volume_of_one_node_is_not_published_to_another() {
    let mut server = SimulatedServer::new();
    let a = VolumeId::new(POOL, "a");
    with_controller(&mut server, |it| it.create_volume(&create("a", 1))).unwrap();
    let code = |server: &mut SimulatedServer, request: ControllerPublishVolumeRequest| {
        with_controller(server, |it| it.publish_volume(&request)).map_err(|status| status.code)
    };
    let response = code(&mut server, publish(&a, NODE, false)).unwrap();
    assert_eq!(response.publish_context["nqn"], a.nqn());
    assert_eq!(code(&mut server, publish(&a, OTHER_NODE, false)), Err(Code::FailedPrecondition));
    assert_eq!(code(&mut server, publish(&a, NODE, true)), Err(Code::AlreadyExists));
    assert_eq!(code(&mut server, publish(&a, "node-1", false)), Err(Code::NotFound));
    let readers = |node: &str| ControllerPublishVolumeRequest {
        volume_capability: Some(capability(Mode::MultiNodeReaderOnly)),
        ..publish(&a, node, false)
    };
    assert_eq!(code(&mut server, readers(OTHER_NODE)).map(drop), Ok(()));
    assert!(server.state.subsystems[&a.nqn()].hosts[OTHER_NODE], "it may only read");
    let refused = with_controller(&mut server, |it| it.delete_volume(&a.to_string()));
    assert_eq!(refused.unwrap_err().code, Code::FailedPrecondition);
    let listed =
        with_controller(&mut server, |it| it.list_volumes(&ListRequest::default())).unwrap();
    let status = listed.entries[0].status.clone().unwrap();
    assert_eq!(status.published_node_ids, [NODE, OTHER_NODE]);
    // Without a node, from all of them.
    let all = ControllerUnpublishVolumeRequest { volume_id: a.to_string(), node_id: String::new() };
    with_controller(&mut server, |it| it.unpublish_volume(&all)).unwrap();
    assert!(server.state.subsystems[&a.nqn()].hosts.is_empty());
}

#[test]
fn group_has_the_volumes_of_one_pool_and_keeps_them() {
    let mut server = SimulatedServer::new();
    let (a, b) = (VolumeId::new(POOL, "a"), VolumeId::new(POOL, "b"));
    for name in ["a", "b"] {
        with_controller(&mut server, |it| it.create_volume(&create(name, 1))).unwrap();
    }
    let request = |ids: &[String]| CreateVolumeGroupSnapshotRequest {
        name: "g".to_owned(),
        source_volume_ids: ids.to_vec(),
        ..CreateVolumeGroupSnapshotRequest::default()
    };
    let group = |server: &mut SimulatedServer, ids: &[String]| {
        with_controller(server, |it| it.create_group_snapshot(&request(ids)))
            .map_err(|status| status.code)
    };
    let other_pool = VolumeId::new(&"f".repeat(32), "a").to_string();
    assert_eq!(group(&mut server, &[a.to_string(), other_pool]), Err(Code::FailedPrecondition));
    assert_eq!(group(&mut server, &[]), Err(Code::InvalidArgument));
    let none = VolumeId::new(POOL, "none").to_string();
    assert_eq!(group(&mut server, &[a.to_string(), none]), Err(Code::NotFound));
    assert_eq!(server.state.volumes.len(), 2, "all or none");
    let made = group(&mut server, &[a.to_string(), b.to_string()]).unwrap().group_snapshot.unwrap();
    assert_eq!(made.snapshots.len(), 2);
    assert_eq!(group(&mut server, &[a.to_string()]), Err(Code::AlreadyExists));
    let member = made.snapshots[0].snapshot_id.clone();
    let refused = with_controller(&mut server, |it| it.delete_snapshot(&member));
    assert_eq!(refused.unwrap_err().code, Code::InvalidArgument);
    let wrong = VolumeGroupSnapshotIdRequest {
        group_snapshot_id: made.group_snapshot_id.clone(),
        snapshot_ids: vec!["other".to_owned()],
    };
    let refused = with_controller(&mut server, |it| it.get_group_snapshot(&wrong));
    assert_eq!(refused.unwrap_err().code, Code::InvalidArgument);
    let right = VolumeGroupSnapshotIdRequest { snapshot_ids: vec![member], ..wrong };
    let found = with_controller(&mut server, |it| it.get_group_snapshot(&right)).unwrap();
    assert_eq!(found.group_snapshot, Some(made));
}

#[test]
fn volume_is_created_where_nodes_can_reach_it() {
    let mut server = SimulatedServer::new();
    let zone = |zone: &str| Topology { segments: [("zone".to_owned(), zone.to_owned())].into() };
    let topology: BTreeMap<_, _> = zone("a").segments;
    let options = ControllerOptions { topology, ..ControllerOptions::default() };
    let mut controller = Controller { api: &mut server, options: &options, now_s: NOW_S };
    let request = |zones: &[&str]| CreateVolumeRequest {
        accessibility_requirements: Some(TopologyRequirement {
            requisite: zones.iter().map(|it| zone(it)).collect(),
            preferred: Vec::new(),
        }),
        ..create("a", 1)
    };
    let refused = controller.create_volume(&request(&["b"])).unwrap_err();
    assert_eq!(refused.code, Code::ResourceExhausted);
    let made = controller.create_volume(&request(&["b", "a"])).unwrap().volume.unwrap();
    assert_eq!(made.accessible_topology, [zone("a")]);
    let mut capacity = |of: &str| {
        let request =
            GetCapacityRequest { accessible_topology: Some(zone(of)), ..Default::default() };
        controller.get_capacity(&request).unwrap().available_capacity
    };
    assert_eq!((capacity("b"), capacity("a") > 0), (0, true));
}

#[test]
fn page_begins_after_the_last_entry_of_the_page_before() {
    let all =
        |names: &[&str]| names.iter().map(|it| ((*it).to_owned(), (*it).to_owned())).collect();
    let page = |names, token, most| {
        page_of::<String>(all(names), (token, most), |token| token.len() == 1).map_err(|it| it.code)
    };
    let first = page(&["c", "a", "b"], "", 2).unwrap();
    assert_eq!((first.entries, first.next_token.as_str()), (vec!["a".into(), "b".into()], "b"));
    // The last entry of the page was deleted meanwhile.
    let second = page(&["a", "c"], "b", 2).unwrap();
    assert_eq!((second.entries, second.next_token.as_str()), (vec!["c".to_owned()], ""));
    assert_eq!(page(&["a"], "bad", 0).map(drop), Err(Code::Aborted));
    assert_eq!(page(&["a"], "", -1).map(drop), Err(Code::InvalidArgument));
}
