//! Device IDs in use by live and by dead processes.

use tenmil_base::Limits;
use tenmil_wire::ublk::{DeviceInfo, DeviceState, Features, Parameters};

use super::super::disk::Disk;
use super::super::server::check_zero_copy;
use super::super::signature;
use super::super::takeover::{DesiredDevice, Server, TakeoverAction, decide_takeover};
use super::{disk, limits};

const DEAD: Server = Server { is_alive: false, has_it_open: false };

fn found(state: DeviceState) -> DeviceInfo {
    DeviceInfo {
        queues: 2,
        depth: 128,
        state,
        io_bytes_max: 32 << 10,
        device: 5,
        process: 4321,
        features: Features::NONE,
        signature: signature("file:/a"),
        owner_uid: 0,
        owner_gid: 0,
    }
}

fn verdict(found: &DeviceInfo, parameters: Option<Parameters>, server: Server) -> TakeoverAction {
    let disk = disk();
    let signature = signature("file:/a");
    let desired = DesiredDevice { disk: &disk, signature, channels_max: 8, replaces: false };
    decide_takeover(found, parameters.as_ref(), server, &desired)
}

fn refusal(verdict: TakeoverAction) -> String {
    match verdict {
        TakeoverAction::Leave(why) => why.text,
        other => panic!("{other:?}, expected a refusal"),
    }
}

#[test]
fn a_dead_device_of_the_same_disk_is_recovered() {
    let parameters = Some(disk().parameters());
    let quiesced = found(DeviceState::Quiesced);
    assert_eq!(verdict(&quiesced, parameters, DEAD), TakeoverAction::Recover);
}

#[test]
fn a_recovered_device_keeps_its_copy_mode() {
    let made = found(DeviceState::Quiesced);
    let uses_zero_copy = DeviceInfo { features: made.features.union(Features::ZERO_COPY), ..made };
    for by_whom in ["the process that has died", "the kernel"] {
        let has_recovered = by_whom.contains("died");
        assert_eq!(check_zero_copy(&uses_zero_copy, has_recovered), Ok(()));
        let why = check_zero_copy(&made, has_recovered).unwrap_err();
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
fn a_live_device_is_kept() {
    let alive = Server { is_alive: true, has_it_open: true };
    let events = refusal(verdict(&found(DeviceState::Live), None, alive));
    assert!(events.contains("ublk:5 is in use: process 4321"), "{events}");
    let making = Server { is_alive: false, has_it_open: true };
    let events = refusal(verdict(&found(DeviceState::Dead), None, making));
    assert!(events.contains("ublk:5 is in use"), "{events}");
    assert_eq!(verdict(&found(DeviceState::Live), None, DEAD), TakeoverAction::Wait);
    assert_eq!(verdict(&found(DeviceState::Dead), None, DEAD), TakeoverAction::Replace);
}

#[test]
fn a_dead_device_of_another_disk_is_kept() {
    let parameters = disk().parameters();
    let quiesced = found(DeviceState::Quiesced);
    let other = DeviceInfo { signature: signature("file:/b"), ..quiesced };
    let events = refusal(verdict(&other, Some(parameters), DEAD));
    assert!(events.contains("process 4321") && events.contains("something else"), "{events}");
    let longer = Parameters { sectors: parameters.sectors + 8, ..parameters };
    let events = refusal(verdict(&quiesced, Some(longer), DEAD));
    assert!(events.contains("4104 sectors") && events.contains("expected 4096"), "{events}");
    let attributes = tenmil_wire::ublk::DiskAttributes::NONE;
    let events = refusal(verdict(&quiesced, Some(Parameters { attributes, ..parameters }), DEAD));
    assert!(events.contains("attributes 0x0"), "{events}");
    let many = DeviceInfo { queues: 9, ..quiesced };
    let events = refusal(verdict(&many, Some(parameters), DEAD));
    assert!(events.contains("9 queues, expected 8"), "{events}");
    let large = DeviceInfo { io_bytes_max: 64 << 10, ..quiesced };
    let events = refusal(verdict(&large, Some(parameters), DEAD));
    assert!(events.contains("65536 bytes"), "{events}");
    refusal(verdict(&quiesced, None, DEAD));
    refusal(verdict(&found(DeviceState::Other(3)), Some(parameters), DEAD));
}

#[test]
fn it_is_taken_away_on_an_explicit_word_unless_somebody_lives_there() {
    let disk = Disk::new(Limits { block_count: 8, ..limits() }, false).unwrap();
    let desired = DesiredDevice { disk: &disk, signature: 0, channels_max: 8, replaces: true };
    let quiesced = found(DeviceState::Quiesced);
    assert_eq!(decide_takeover(&quiesced, None, DEAD, &desired), TakeoverAction::Replace);
    let alive = Server { is_alive: true, has_it_open: true };
    let live = decide_takeover(&found(DeviceState::Live), None, alive, &desired);
    assert!(matches!(live, TakeoverAction::Leave(_)), "{live:?}");
}

#[test]
fn names_are_told_apart() {
    let all = ["", "file:/a", "file:/b", "file:/a?size=1m", "ram:1m"].map(signature);
    for (at, one) in all.iter().enumerate() {
        assert!(!all[at + 1..].contains(one));
    }
    assert_eq!(signature("file:/a"), signature("file:/a"), "in every process");
    assert_eq!(signature(""), 0x5780_bcd6_e4c2_e7ea);
}
