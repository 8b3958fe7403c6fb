//! Memory that is mapped, unmapped, and truncated.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use tenmil_linux::RemoteEventFd;
use tenmil_reactor::PollMode;
use tenmil_vfio_user::server::DmaMap;

use super::test_client::{DATA, IOVA, MEMORY_BYTES, TestServer, whole_memory_map};
use crate::endpoint_event::EndpointEvent;

#[test]
fn overlapping_or_unknown_dma_mappings_are_rejected_without_effect() {
    let rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    let mut at = |iova, len_bytes| {
        let id =
            machine.client.request_dma_map(DmaMap { iova, len_bytes, ..whole_memory_map() }, None);
        machine.await_errno(id)
    };
    assert_eq!(at(IOVA, MEMORY_BYTES), 17);
    assert_eq!(at(IOVA - 4096, 8192), 17);
    assert_eq!(at(IOVA + MEMORY_BYTES - 4096, 8192), 17);
    assert_eq!(at(0, u64::MAX), 17);
    assert_eq!(at(IOVA - 4096, 4096), 0);
    assert_eq!(at(IOVA + MEMORY_BYTES, 4096), 0);
    let mut removed = |iova, len_bytes| {
        let id = machine.client.request_dma_unmap(iova, len_bytes);
        machine.await_errno(id)
    };
    assert_eq!(removed(IOVA, 4096), 2, "a part");
    assert_eq!(removed(IOVA - 4096, 4096), 0);
    assert_eq!(removed(IOVA - 4096, 4096), 2, "twice");
    machine.enable_controller();
    machine.create_io_queue();
    assert_eq!(machine.execute_read_or_write(2, 0, 1), 0);
}

#[test]
fn short_or_missing_dma_file_is_rejected_by_name() {
    let rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    let file = Arc::new(machine.regions.descriptor(machine.memory.id()).unwrap());
    let id = machine
        .client
        .request_dma_map(DmaMap { len_bytes: 2 << 20, ..whole_memory_map() }, Some(file.clone()));
    assert_eq!(machine.await_errno(id), 22);
    let EndpointEvent::Error(text) =
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Error(_)))
    else {
        panic!()
    };
    assert!(text.contains("it has 1048576 bytes"), "{text}");
    let id =
        machine.client.request_dma_map(DmaMap { file_offset: 1, ..whole_memory_map() }, Some(file));
    assert_eq!(machine.await_errno(id), 22);
    let (event, _line) = RemoteEventFd::pair().unwrap();
    let id = machine.client.request_dma_map(whole_memory_map(), Some(Arc::new(event)));
    assert_eq!(machine.await_errno(id), 22);
    machine.map_own_memory(true);
}

/// QEMU maps memory that its guest may only read in this way.
#[test]
fn memory_of_a_read_only_file_is_read_by_message_and_never_written() {
    let rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    let file = machine.regions.descriptor(machine.memory.id()).unwrap();
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let file = Arc::new(std::fs::File::options().read(true).open(name).unwrap().into());
    let iova = 1 << 32;
    let map = DmaMap { iova, len_bytes: 0x4000, file_offset: DATA, ..whole_memory_map() };
    let id = machine.client.request_dma_map(DmaMap { is_writable: false, ..map }, Some(file));
    assert_eq!(machine.await_errno(id), 0);
    machine.enable_controller();
    machine.create_io_queue();
    // Access by message uses the original addresses; this is their offset in the machine.
    machine.shift = iova - DATA - IOVA;
    machine.store_memory(DATA, &[7; 4096]);
    let at = |opcode| super::test_client::admin_command(&[(0, opcode), (1, 1), (7, 1), (12, 7)]);
    machine.submit_command(1, at(1));
    assert_eq!(machine.await_completion(1), 0);
    assert!(machine.asked > 0, "by message");
    machine.submit_command(1, at(2));
    assert_ne!(machine.await_completion(1), 0, "it may not be written");
    assert_eq!(machine.execute_read_or_write(2, 0, 8), 0);
    assert!(machine.load_memory(DATA, 4096).iter().all(|byte| *byte == 7));
}

#[test]
fn unmapped_memory_is_not_accessed_and_later_requests_are_served() {
    for is_shared in [true, false] {
        let rig = TestServer::new(PollMode::Adaptive);
        let mut machine = rig.connect_client();
        machine.map_own_memory(is_shared);
        // Data in another mapping than the rings.
        let (iova, at) = (1 << 32, DATA);
        let part = DmaMap { iova, len_bytes: 0x4000, file_offset: at, ..whole_memory_map() };
        let file = machine.regions.descriptor(machine.memory.id()).map(Arc::new);
        let id = machine.client.request_dma_map(part, file);
        assert_eq!(machine.await_errno(id), 0);
        machine.enable_controller();
        machine.create_io_queue();
        let read = super::test_client::admin_command(&[(0, 2), (1, 1), (7, 1), (12, 7)]);
        machine.store_memory(DATA, &[7; 4096]);
        machine.submit_command(1, read);
        assert_eq!(machine.await_completion(1), 0);
        assert!(machine.load_memory(DATA, 4096).iter().all(|byte| *byte == 0));
        let regions = rig.regions.region_count();
        let id = machine.client.request_dma_unmap(iova, 0x4000);
        assert_eq!(machine.await_errno(id), 0);
        assert_eq!(rig.regions.region_count(), regions - 1, "let go before it is answered");
        machine.store_memory(DATA, &[7; 4096]);
        machine.submit_command(1, read);
        assert_ne!(machine.await_completion(1), 0, "a transfer error");
        assert!(machine.load_memory(DATA, 4096).iter().all(|byte| *byte == 7));
        assert_eq!(machine.execute_read_or_write(2, 0, 1), 0);
    }
}

#[test]
fn controller_whose_rings_are_unmapped_fails_and_can_be_enabled_again() {
    let rig = TestServer::new(PollMode::Adaptive);
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    machine.enable_controller();
    machine.create_io_queue();
    let id = machine.client.request_dma_unmap(IOVA, MEMORY_BYTES);
    assert_eq!(machine.await_errno(id), 0);
    assert_eq!(machine.read_region(0x1c, 4) & 3, 3, "CSTS.CFS");
    machine.write_region(0x14, &0_u32.to_le_bytes());
    machine.await_csts_ready(0);
    machine.map_own_memory(true);
    machine.clear_queues();
    machine.enable_controller();
    machine.create_io_queue();
    assert_eq!(machine.execute_read_or_write(2, 0, 1), 0);
}

/// Memory of a machine whose file is not sealed and is truncated.
#[test]
fn client_that_truncates_shared_memory_is_disconnected() {
    let rig = TestServer::new(PollMode::Adaptive);
    let baseline = rig.regions.region_count();
    let mut machine = rig.connect_client();
    machine.map_own_memory(true);
    let directory = tempfile::tempdir_in("/dev/shm").unwrap();
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(directory.path().join("memory"))
        .unwrap();
    file.set_len(0x4000).unwrap();
    let part = DmaMap { iova: 1 << 32, len_bytes: 0x4000, ..whole_memory_map() };
    let id = machine.client.request_dma_map(part, Some(Arc::new(file.try_clone().unwrap().into())));
    assert_eq!(machine.await_errno(id), 0);
    machine.enable_controller();
    machine.create_io_queue();
    file.set_len(0).unwrap();
    machine
        .submit_command(1, super::test_client::admin_command(&[(0, 2), (1, 1), (7, 1), (12, 7)]));
    let EndpointEvent::Disconnected(Some(why)) =
        rig.await_event(|new_events| matches!(new_events, EndpointEvent::Disconnected(_)))
    else {
        panic!("it left by itself")
    };
    assert!(why.contains("0x100000000") && why.contains("shorter"), "{why}");
    rig.await_region_count(baseline);
    let mut next = rig.connect_client();
    next.map_own_memory(true);
    next.enable_controller();
    next.create_io_queue();
    assert_eq!(next.execute_read_or_write(2, 0, 1), 0);
}
