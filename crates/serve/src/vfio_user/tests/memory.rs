//! Memory that is mapped, unmapped, and truncated.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use tenmil_linux::RemoteEventFd;
use tenmil_reactor::PollMode;
use tenmil_vfio_user::server::DmaMap;

use super::rig::{DATA, IOVA, MEMORY_BYTES, Rig, whole};
use crate::endpoint_event::EndpointEvent;

#[test]
fn maps_that_overlap_or_are_not_there_are_refused_and_harm_nothing() {
    let rig = Rig::new(PollMode::Adaptive);
    let mut machine = rig.machine();
    machine.map(true);
    let mut at = |iova, len_bytes| {
        let id = machine.client.map_dma(DmaMap { iova, len_bytes, ..whole() }, None);
        machine.errno(id)
    };
    assert_eq!(at(IOVA, MEMORY_BYTES), 17);
    assert_eq!(at(IOVA - 4096, 8192), 17);
    assert_eq!(at(IOVA + MEMORY_BYTES - 4096, 8192), 17);
    assert_eq!(at(0, u64::MAX), 17);
    assert_eq!(at(IOVA - 4096, 4096), 0);
    assert_eq!(at(IOVA + MEMORY_BYTES, 4096), 0);
    let mut removed = |iova, len_bytes| {
        let id = machine.client.unmap_dma(iova, len_bytes);
        machine.errno(id)
    };
    assert_eq!(removed(IOVA, 4096), 2, "a part");
    assert_eq!(removed(IOVA - 4096, 4096), 0);
    assert_eq!(removed(IOVA - 4096, 4096), 2, "twice");
    machine.enable();
    machine.make_queue();
    assert_eq!(machine.transfer(2, 0, 1), 0);
}

#[test]
fn a_file_that_is_too_short_or_no_file_at_all_is_refused_by_name() {
    let rig = Rig::new(PollMode::Adaptive);
    let mut machine = rig.machine();
    let file = Arc::new(machine.regions.descriptor(machine.memory.id()).unwrap());
    let id = machine.client.map_dma(DmaMap { len_bytes: 2 << 20, ..whole() }, Some(file.clone()));
    assert_eq!(machine.errno(id), 22);
    let EndpointEvent::Error(text) =
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)))
    else {
        panic!()
    };
    assert!(text.contains("it has 1048576 bytes"), "{text}");
    let id = machine.client.map_dma(DmaMap { file_offset: 1, ..whole() }, Some(file));
    assert_eq!(machine.errno(id), 22);
    let (event, _line) = RemoteEventFd::pair().unwrap();
    let id = machine.client.map_dma(whole(), Some(Arc::new(event)));
    assert_eq!(machine.errno(id), 22);
    machine.map(true);
}

/// QEMU maps memory that its guest may only read in this way.
#[test]
fn memory_whose_file_can_only_be_read_is_read_by_message_and_never_written() {
    let rig = Rig::new(PollMode::Adaptive);
    let mut machine = rig.machine();
    machine.map(true);
    let file = machine.regions.descriptor(machine.memory.id()).unwrap();
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let file = Arc::new(std::fs::File::options().read(true).open(name).unwrap().into());
    let iova = 1 << 32;
    let map = DmaMap { iova, len_bytes: 0x4000, file_offset: DATA, ..whole() };
    let id = machine.client.map_dma(DmaMap { is_writable: false, ..map }, Some(file));
    assert_eq!(machine.errno(id), 0);
    machine.enable();
    machine.make_queue();
    // Access by message uses the original addresses; this is their offset in the machine.
    machine.shift = iova - DATA - IOVA;
    machine.store(DATA, &[7; 4096]);
    let at = |opcode| super::rig::command(&[(0, opcode), (1, 1), (7, 1), (12, 7)]);
    machine.submit(1, at(1));
    assert_eq!(machine.complete(1), 0);
    assert!(machine.asked > 0, "by message");
    machine.submit(1, at(2));
    assert_ne!(machine.complete(1), 0, "it may not be written");
    assert_eq!(machine.transfer(2, 0, 8), 0);
    assert!(machine.load(DATA, 4096).iter().all(|byte| *byte == 7));
}

#[test]
fn what_is_unmapped_is_reached_no_more_and_what_follows_is_served() {
    for is_shared in [true, false] {
        let rig = Rig::new(PollMode::Adaptive);
        let mut machine = rig.machine();
        machine.map(is_shared);
        // Data in another mapping than the rings.
        let (iova, at) = (1 << 32, DATA);
        let part = DmaMap { iova, len_bytes: 0x4000, file_offset: at, ..whole() };
        let file = machine.regions.descriptor(machine.memory.id()).map(Arc::new);
        let id = machine.client.map_dma(part, file);
        assert_eq!(machine.errno(id), 0);
        machine.enable();
        machine.make_queue();
        let read = super::rig::command(&[(0, 2), (1, 1), (7, 1), (12, 7)]);
        machine.store(DATA, &[7; 4096]);
        machine.submit(1, read);
        assert_eq!(machine.complete(1), 0);
        assert!(machine.load(DATA, 4096).iter().all(|byte| *byte == 0));
        let regions = rig.regions.count();
        let id = machine.client.unmap_dma(iova, 0x4000);
        assert_eq!(machine.errno(id), 0);
        assert_eq!(rig.regions.count(), regions - 1, "let go before it is answered");
        machine.store(DATA, &[7; 4096]);
        machine.submit(1, read);
        assert_ne!(machine.complete(1), 0, "a transfer error");
        assert!(machine.load(DATA, 4096).iter().all(|byte| *byte == 7));
        assert_eq!(machine.transfer(2, 0, 1), 0);
    }
}

#[test]
fn a_controller_whose_rings_are_unmapped_fails_and_can_be_enabled_again() {
    let rig = Rig::new(PollMode::Adaptive);
    let mut machine = rig.machine();
    machine.map(true);
    machine.enable();
    machine.make_queue();
    let id = machine.client.unmap_dma(IOVA, MEMORY_BYTES);
    assert_eq!(machine.errno(id), 0);
    assert_eq!(machine.read(0x1c, 4) & 3, 3, "CSTS.CFS");
    machine.write(0x14, &0_u32.to_le_bytes());
    machine.await_status(0);
    machine.map(true);
    machine.forget_queues();
    machine.enable();
    machine.make_queue();
    assert_eq!(machine.transfer(2, 0, 1), 0);
}

/// Memory of a machine whose file is not sealed and is truncated.
#[test]
fn a_client_that_truncates_memory_is_disconnected() {
    let rig = Rig::new(PollMode::Adaptive);
    let baseline = rig.regions.count();
    let mut machine = rig.machine();
    machine.map(true);
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(directory.path().join("memory"))
        .unwrap();
    file.set_len(0x4000).unwrap();
    let part = DmaMap { iova: 1 << 32, len_bytes: 0x4000, ..whole() };
    let id = machine.client.map_dma(part, Some(Arc::new(file.try_clone().unwrap().into())));
    assert_eq!(machine.errno(id), 0);
    machine.enable();
    machine.make_queue();
    file.set_len(0).unwrap();
    machine.submit(1, super::rig::command(&[(0, 2), (1, 1), (7, 1), (12, 7)]));
    let EndpointEvent::Disconnected(Some(why)) =
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)))
    else {
        panic!("it left by itself")
    };
    assert!(why.contains("0x100000000") && why.contains("shorter"), "{why}");
    rig.await_regions(baseline);
    let mut next = rig.machine();
    next.map(true);
    next.enable();
    next.make_queue();
    assert_eq!(next.transfer(2, 0, 1), 0);
}
