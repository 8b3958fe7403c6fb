//! Device IDs in use by live and by dead processes.

use tenmil_base::Limits;
use tenmil_wire::ublk::{DeviceInfo, DeviceState, Features, Parameters};

use super::super::disk::UblkDisk;
use super::super::server::zero_copy_result;
use super::super::takeover::{DesiredDevice, ServerProcess, TakeoverAction, decide_takeover};
use super::super::uri_hash;
use super::{device_limits, test_disk};

const DEAD: ServerProcess = ServerProcess { is_alive: false, has_it_open: false };

fn existing_device(state: DeviceState) -> DeviceInfo {
    DeviceInfo {
        queues: 2,
        depth: 128,
        state,
        io_bytes_max: 32 << 10,
        device: 5,
        process: 4321,
        features: Features::NONE,
        signature: uri_hash("file:/a"),
        owner_uid: 0,
        owner_gid: 0,
    }
}

fn takeover_action(
    found: &DeviceInfo,
    parameters: Option<Parameters>,
    server: ServerProcess,
) -> TakeoverAction {
    let disk = test_disk();
    let signature = uri_hash("file:/a");
    let desired = DesiredDevice { disk: &disk, signature, channels_max: 8, replaces: false };
    decide_takeover(found, parameters.as_ref(), server, &desired)
}

fn takeover_error(verdict: TakeoverAction) -> String {
    match verdict {
        TakeoverAction::Leave(why) => why.text,
        other => panic!("{other:?}, expected a refusal"),
    }
}

#[test]
fn dead_device_of_the_same_disk_is_recovered() {
    let parameters = Some(test_disk().parameters());
    let quiesced = existing_device(DeviceState::Quiesced);
    assert_eq!(takeover_action(&quiesced, parameters, DEAD), TakeoverAction::Recover);
}

#[test]
fn recovered_device_keeps_its_copy_mode() {
    let made = existing_device(DeviceState::Quiesced);
    let uses_zero_copy = DeviceInfo { features: made.features.union(Features::ZERO_COPY), ..made };
    for by_whom in ["the process that has died", "the kernel"] {
        let has_recovered = by_whom.contains("died");
        assert_eq!(zero_copy_result(&uses_zero_copy, has_recovered), Ok(()));
        let why = zero_copy_result(&made, has_recovered).unwrap_err();
        assert_eq!(
            why,
            tenmil_base::Error::environment(format!(
                "{by_whom} has made ublk:{} without zero copy",
                made.device
            ))
        );
    }
}

#[test]
fn device_of_a_live_server_is_kept() {
    let alive = ServerProcess { is_alive: true, has_it_open: true };
    let events = takeover_error(takeover_action(&existing_device(DeviceState::Live), None, alive));
    assert!(events.contains("ublk:5 is in use: process 4321"), "{events}");
    let making = ServerProcess { is_alive: false, has_it_open: true };
    let events = takeover_error(takeover_action(&existing_device(DeviceState::Dead), None, making));
    assert!(events.contains("ublk:5 is in use"), "{events}");
    assert_eq!(
        takeover_action(&existing_device(DeviceState::Live), None, DEAD),
        TakeoverAction::Wait
    );
    assert_eq!(
        takeover_action(&existing_device(DeviceState::Dead), None, DEAD),
        TakeoverAction::Replace
    );
}

#[test]
fn dead_device_of_another_disk_is_kept() {
    let parameters = test_disk().parameters();
    let quiesced = existing_device(DeviceState::Quiesced);
    let other = DeviceInfo { signature: uri_hash("file:/b"), ..quiesced };
    let events = takeover_error(takeover_action(&other, Some(parameters), DEAD));
    assert!(events.contains("process 4321") && events.contains("something else"), "{events}");
    let longer = Parameters { sectors: parameters.sectors + 8, ..parameters };
    let events = takeover_error(takeover_action(&quiesced, Some(longer), DEAD));
    assert!(events.contains("4104 sectors") && events.contains("expected 4096"), "{events}");
    let attributes = tenmil_wire::ublk::DiskAttributes::NONE;
    let events = takeover_error(takeover_action(
        &quiesced,
        Some(Parameters { attributes, ..parameters }),
        DEAD,
    ));
    assert!(events.contains("attributes 0x0"), "{events}");
    let many = DeviceInfo { queues: 9, ..quiesced };
    let events = takeover_error(takeover_action(&many, Some(parameters), DEAD));
    assert!(events.contains("9 queues, expected 8"), "{events}");
    let large = DeviceInfo { io_bytes_max: 64 << 10, ..quiesced };
    let events = takeover_error(takeover_action(&large, Some(parameters), DEAD));
    assert!(events.contains("65536 bytes"), "{events}");
    takeover_error(takeover_action(&quiesced, None, DEAD));
    takeover_error(takeover_action(
        &existing_device(DeviceState::Other(3)),
        Some(parameters),
        DEAD,
    ));
}

#[test]
fn dead_device_is_replaced_only_if_forced_and_not_in_use() {
    let disk = UblkDisk::new(Limits { block_count: 8, ..device_limits() }, false).unwrap();
    let desired = DesiredDevice { disk: &disk, signature: 0, channels_max: 8, replaces: true };
    let quiesced = existing_device(DeviceState::Quiesced);
    assert_eq!(decide_takeover(&quiesced, None, DEAD, &desired), TakeoverAction::Replace);
    let alive = ServerProcess { is_alive: true, has_it_open: true };
    let live = decide_takeover(&existing_device(DeviceState::Live), None, alive, &desired);
    assert!(matches!(live, TakeoverAction::Leave(_)), "{live:?}");
}

#[test]
fn uris_have_different_hashes() {
    let all = ["", "file:/a", "file:/b", "file:/a?size=1m", "ram:1m"].map(uri_hash);
    for (at, one) in all.iter().enumerate() {
        assert!(!all[at + 1..].contains(one));
    }
    assert_eq!(uri_hash("file:/a"), uri_hash("file:/a"), "in every process");
    assert_eq!(uri_hash(""), 0x5780_bcd6_e4c2_e7ea);
}
