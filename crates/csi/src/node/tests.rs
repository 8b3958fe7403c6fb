//! The node against a simulated system: every call is cut at every step, and called again.

mod simulated_system;

use std::path::Path;

use prost::Message;

use self::simulated_system::{Content, Cut, SimulatedSystem};
use super::{Node, NodeOptions};
use crate::connection::Connection;
use crate::messages::{
    AccessMode, CapacityRange, Empty, Mode, MountVolume, NodeExpandVolumeRequest,
    NodeGetVolumeRequest, NodePathRequest, NodePublishVolumeRequest, NodeStageVolumeRequest,
    VolumeCapability,
};
use crate::names::VolumeId;
use crate::node_system::NodeSystem;
use crate::status::{CallResult, Code};

const NODE: &str = "nqn.2014-08.org.example:node";
const STAGING: &str = "/staging";
const TARGET: &str = "/pods/1/target";
const OTHER_TARGET: &str = "/pods/2/target";
const MIB: u64 = 1 << 20;

/// Call of the node, which returns the bytes of its response.
type Call = Box<dyn Fn(&mut Node<'_, SimulatedSystem>) -> CallResult<Vec<u8>>>;

fn volume() -> VolumeId {
    VolumeId::new(&"0".repeat(32), "a")
}

fn system() -> SimulatedSystem {
    SimulatedSystem::new(&volume().nqn(), 64 * MIB)
}

fn with_node<T>(
    system: &mut SimulatedSystem,
    run: impl FnOnce(&mut Node<'_, SimulatedSystem>) -> T,
) -> T {
    let options = NodeOptions { host: NODE.to_owned(), ..NodeOptions::default() };
    run(&mut Node { system, options: &options })
}

fn capability(fs_type: Option<&str>, mode: Mode) -> Option<VolumeCapability> {
    let mount =
        |fs_type: &str| MountVolume { fs_type: fs_type.to_owned(), mount_flags: Vec::new() };
    Some(VolumeCapability {
        block: fs_type.is_none().then_some(Empty {}),
        mount: fs_type.map(mount),
        access_mode: Some(AccessMode { mode: mode as i32 }),
    })
}

fn stage(fs_type: Option<&str>, mode: Mode) -> NodeStageVolumeRequest {
    let connection = Connection {
        nqn: volume().nqn(),
        addresses: vec!["192.0.2.1:4420".to_owned()],
        host: NODE.to_owned(),
    };
    NodeStageVolumeRequest {
        volume_id: volume().to_string(),
        publish_context: connection.to_context(),
        staging_target_path: STAGING.to_owned(),
        volume_capability: capability(fs_type, mode),
    }
}

fn publish(target: &str, fs_type: Option<&str>, readonly: bool) -> NodePublishVolumeRequest {
    NodePublishVolumeRequest {
        volume_id: volume().to_string(),
        staging_target_path: STAGING.to_owned(),
        target_path: target.to_owned(),
        volume_capability: capability(fs_type, Mode::SingleNodeMultiWriter),
        readonly,
    }
}

fn at(path: &str) -> NodePathRequest {
    NodePathRequest { volume_id: volume().to_string(), path: path.to_owned() }
}

fn expand() -> NodeExpandVolumeRequest {
    NodeExpandVolumeRequest {
        volume_id: volume().to_string(),
        volume_path: TARGET.to_owned(),
        capacity_range: Some(CapacityRange { required_bytes: 64 << 20, limit_bytes: 0 }),
        volume_capability: None,
    }
}

fn call<R: 'static, T: Message>(
    request: R,
    method: impl Fn(&mut Node<'_, SimulatedSystem>, &R) -> CallResult<T> + 'static,
) -> Call {
    Box::new(move |node| method(node, &request).map(|it| it.encode_to_vec()))
}

fn stage_call(fs_type: Option<&str>) -> Call {
    call(stage(fs_type, Mode::SingleNodeMultiWriter), |node, it| {
        node.stage_volume(it).map(|()| Empty {})
    })
}

fn publish_call(target: &str, fs_type: Option<&str>, readonly: bool) -> Call {
    call(publish(target, fs_type, readonly), |node, it| node.publish_volume(it).map(|()| Empty {}))
}

fn unpublish_call(target: &str) -> Call {
    call(at(target), |node, it| node.unpublish_volume(it).map(|()| Empty {}))
}

/// The life of a volume on a node.
fn calls_of_a_life(fs_type: Option<&str>) -> Vec<(&'static str, Call)> {
    vec![
        ("stage", stage_call(fs_type)),
        ("publish", publish_call(TARGET, fs_type, false)),
        ("publish read-only", publish_call(OTHER_TARGET, fs_type, true)),
        ("expand", call(expand(), |node, it| node.expand_volume(it))),
        ("unpublish", unpublish_call(TARGET)),
        ("unpublish the other", unpublish_call(OTHER_TARGET)),
        ("unstage", call(at(STAGING), |node, it| node.unstage_volume(it).map(|()| Empty {}))),
        ("stage again", stage_call(fs_type)),
        ("unstage again", call(at(STAGING), |node, it| node.unstage_volume(it).map(|()| Empty {}))),
    ]
}

#[test]
fn call_that_is_cut_at_any_step_completes_when_it_is_repeated() {
    let mut cuts = 0;
    for fs_type in [Some("ext4"), Some("xfs"), None] {
        for shows_partial in [false, true] {
            let mut system = system();
            system.state.shows_partial = shows_partial;
            for (name, call) in calls_of_a_life(fs_type) {
                let before = system.clone();
                let expected = with_node(&mut system, &call);
                let expected = expected.unwrap_or_else(|why| panic!("{name}: {why}"));
                let again = with_node(&mut system.clone(), &call);
                assert_eq!(again.as_ref(), Ok(&expected), "{name}, repeated");
                for cut in [Cut::Before, Cut::During, Cut::After] {
                    for at in 1.. {
                        let mut cut_system = before.clone();
                        cut_system.cut = Some((at, cut));
                        let interrupted = with_node(&mut cut_system, &call);
                        if cut_system.cut.is_some() {
                            assert!(interrupted.is_ok(), "{name}: {interrupted:?}");
                            break;
                        }
                        cuts += 1;
                        let repeated = with_node(&mut cut_system, &call);
                        assert_eq!(repeated.as_ref(), Ok(&expected), "{name}, {cut:?} step {at}");
                        assert_eq!(cut_system.state, system.state, "{name}, {cut:?} step {at}");
                    }
                }
                if name == "publish" {
                    system.write_data(7);
                }
            }
            assert_eq!(system.data(), fs_type.map(|_| 7), "what was written is there");
            assert_eq!(system.state.mounts, []);
            assert!(system.attached_device(&volume().nqn()).unwrap().is_none());
        }
    }
    assert!(cuts > 300, "{cuts} cuts");
}

#[test]
fn device_with_other_data_is_not_formatted() {
    for content in [Content::Other, Content::FileSystem { name: "xfs", size_bytes: MIB, data: 7 }] {
        let mut system = system();
        system.state.content = content.clone();
        let refused = with_node(&mut system, stage_call(Some("ext4"))).unwrap_err();
        assert_eq!(refused.code, Code::FailedPrecondition);
        assert_eq!(system.state.content, content);
    }
    // Not even one of which it is known that a file system was being made, if it can be mounted.
    let mut system = system();
    let whole = Content::FileSystem { name: "ext4", size_bytes: 64 * MIB, data: 7 };
    system.state.content = whole.clone();
    system.set_formatting(&volume().nqn(), true).unwrap();
    with_node(&mut system, stage_call(Some("ext4"))).unwrap();
    assert_eq!(system.state.content, whole);
    assert!(!system.is_formatting(&volume().nqn()).unwrap());
}

#[test]
fn reader_neither_formats_nor_writes() {
    let mut system = system();
    let readers = stage(Some("ext4"), Mode::MultiNodeReaderOnly);
    let refused = with_node(&mut system, |node| node.stage_volume(&readers)).unwrap_err();
    assert_eq!(refused.code, Code::FailedPrecondition);
    assert_eq!(system.state.content, Content::Empty);
    let smaller = Content::FileSystem { name: "ext4", size_bytes: MIB, data: 7 };
    system.state.content = smaller.clone();
    with_node(&mut system, |node| node.stage_volume(&readers)).unwrap();
    assert_eq!(system.state.content, smaller);
    assert!(system.state.mounts[0].is_read_only);
}

#[test]
fn clone_that_is_larger_than_its_file_system_grows_when_it_is_staged() {
    let mut system = system();
    system.state.content = Content::FileSystem { name: "ext4", size_bytes: MIB, data: 7 };
    with_node(&mut system, stage_call(Some("ext4"))).unwrap();
    let grown = Content::FileSystem { name: "ext4", size_bytes: 64 * MIB, data: 7 };
    assert_eq!(system.state.content, grown);
}

#[test]
fn volume_of_one_writer_is_published_at_one_place() {
    for fs_type in [Some("ext4"), None] {
        let mut system = system();
        let single = |target| NodePublishVolumeRequest {
            volume_capability: capability(fs_type, Mode::SingleNodeSingleWriter),
            ..publish(target, fs_type, false)
        };
        with_node(&mut system, stage_call(fs_type)).unwrap();
        for _ in 0..2 {
            with_node(&mut system, |node| node.publish_volume(&single(TARGET))).unwrap();
        }
        let refused = with_node(&mut system, |node| node.publish_volume(&single(OTHER_TARGET)));
        assert_eq!(refused.unwrap_err().code, Code::FailedPrecondition);
        with_node(&mut system, publish_call(OTHER_TARGET, fs_type, false)).unwrap();
    }
}

#[test]
fn what_is_not_staged_or_in_use_is_refused() {
    let mut system = system();
    let publish = |readonly| publish_call(TARGET, Some("ext4"), readonly);
    let code = |system: &mut SimulatedSystem, call: Call| {
        with_node(system, call).map(drop).map_err(|status| status.code)
    };
    assert_eq!(code(&mut system, publish(false)), Err(Code::FailedPrecondition));
    assert_eq!(code(&mut system, stage_call(Some("ext4"))), Ok(()));
    assert_eq!(code(&mut system, publish(true)), Ok(()));
    assert_eq!(code(&mut system, publish(false)), Err(Code::AlreadyExists));
    let unstage = || call(at(STAGING), |node, it| node.unstage_volume(it).map(|()| Empty {}));
    assert_eq!(code(&mut system, unstage()), Err(Code::FailedPrecondition));
    assert!(system.attached_device(&volume().nqn()).unwrap().is_some(), "it is mounted elsewhere");
    let stats = |path: &str| NodeGetVolumeRequest {
        volume_id: volume().to_string(),
        volume_path: path.to_owned(),
    };
    let found = with_node(&mut system, |node| node.volume_stats(&stats(TARGET))).unwrap();
    assert_eq!(found.usage[0].total, 64 << 20);
    let missing = with_node(&mut system, |node| node.volume_stats(&stats("/other")));
    assert_eq!(missing.unwrap_err().code, Code::NotFound);
    assert_eq!(code(&mut system, unpublish_call(TARGET)), Ok(()));
    assert!(!system.exists(Path::new(TARGET)));
    assert_eq!(code(&mut system, unstage()), Ok(()));
}

#[test]
fn connection_of_another_node_and_a_node_without_attachment_are_refused() {
    let mut system = system();
    let mut other = stage(None, Mode::SingleNodeWriter);
    other.publish_context.insert("host".into(), "nqn.2014-08.org.example:other".into());
    let refused = with_node(&mut system, |node| node.stage_volume(&other)).unwrap_err();
    assert_eq!(refused.code, Code::InvalidArgument);
    system.problem = Some("no nvme-tcp".to_owned());
    let refused = with_node(&mut system, stage_call(None)).unwrap_err();
    assert_eq!((refused.code, refused.message.as_str()), (Code::FailedPrecondition, "no nvme-tcp"));
    let health = with_node(&mut system, |node| node.storage_health());
    assert_eq!(health.backend_health.len(), 1);
}
