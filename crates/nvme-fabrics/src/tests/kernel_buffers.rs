//! Data in kernel buffers: they have no address, and are transmitted all the same.

use tenmil_base::{IoStatus, Memory, Operation, Segment};
use tenmil_dma::{KernelBufferSource, MemoryBacking, MemoryMapping};

use super::simulated_time::SimulatedTime;
use super::single_path_host::SinglePathHost;
use super::target::{load_host_memory, pattern};

/// Requests with data in kernel buffers, and their maximum length.
const REQUESTS: u16 = 4;
const EACH: u32 = 1 << 17;

fn kernel_buffer_offset(_: u16, request: u16, byte: u32) -> u64 {
    u64::from(request) * u64::from(EACH) + u64::from(byte)
}

/// The data of requests in kernel buffers, whose owner copies from and to them on request.
fn register_kernel_buffers_of(host: &SinglePathHost, requests_there: u16) -> Segment {
    let len = usize::from(requests_there) * EACH as usize;
    let file = MemoryMapping::new(len, MemoryBacking::Shared).unwrap();
    let descriptor = file.descriptor().unwrap().try_clone_to_owned().unwrap();
    let lender = KernelBufferSource { descriptor, queue: 0, data_at: kernel_buffer_offset };
    host.regions.register_kernel_buffers(lender, (REQUESTS, EACH)).unwrap()
}

/// The first blocks of a request.
fn request_segment(leased: Segment, request: u32, blocks: u32) -> Segment {
    leased.slice(request * EACH, blocks * 512).unwrap()
}

#[test]
fn kernel_buffers_are_written_and_read() {
    let mut host = SinglePathHost::with_queue(32);
    let leased = register_kernel_buffers_of(&host, REQUESTS);
    for (seed, blocks) in [(1, 1), (2, 7), (3, 8), (4, 40), (5, 200), (6, 256)] {
        let (from, to) = (request_segment(leased, 1, blocks), request_segment(leased, 3, blocks));
        let bytes = pattern(seed, from.len_bytes as usize);
        host.regions.store(from, &bytes).unwrap();
        assert_eq!(host.run_request(Operation::Write, 5, &[from]), IoStatus::SUCCESS);
        let place = host.buffer(0, blocks);
        assert_eq!(host.run_request(Operation::Read, 5, &[place]), IoStatus::SUCCESS);
        assert!(load_host_memory(&host.regions, place) == bytes, "{blocks} blocks were written");
        assert_eq!(host.run_request(Operation::Read, 5, &[to]), IoStatus::SUCCESS);
        assert!(load_host_memory(&host.regions, to) == bytes, "{blocks} blocks were read");
        host.write_and_verify(9, blocks, seed + 100);
    }
}

#[test]
fn kernel_buffers_and_host_memory_are_used_concurrently() {
    let mut host = SinglePathHost::with_queue(32);
    let leased = register_kernel_buffers_of(&host, REQUESTS);
    for round in 0..20_u64 {
        let bytes = pattern(round, 64 * 512);
        let place = |host: &SinglePathHost, number: u64| match number % 2 {
            0 => request_segment(leased, u32::try_from(number % 4).unwrap(), 64),
            _ => host.buffer(number, 64),
        };
        let (from, lba) = (place(&host, round), round * 64);
        host.regions.store(from, &bytes).unwrap();
        assert_eq!(host.run_request(Operation::Write, lba, &[from]), IoStatus::SUCCESS);
        // All of them are in flight at once.
        let into: Vec<Segment> = (0..4).map(|number| place(&host, number)).collect();
        for (token, into) in (0..).zip(&into) {
            host.regions.store(*into, &[0xee; 64 * 512]).unwrap();
            assert!(host.submit(0, Operation::Read, lba, &[*into], token));
        }
        host.run_until(|host| host.completions.len() == 4);
        assert!(
            host.completions.drain(..).all(|completion| completion.status == IoStatus::SUCCESS)
        );
        for into in into {
            assert!(load_host_memory(&host.regions, into) == bytes, "round {round}, {into:?}");
        }
    }
}

/// A list would have to name each of its pieces by an address.
#[test]
fn segment_list_of_kernel_buffers_is_rejected() {
    let mut host = SinglePathHost::with_queue(32);
    let leased = register_kernel_buffers_of(&host, REQUESTS);
    let pieces = [request_segment(leased, 0, 8), request_segment(leased, 2, 8)];
    for operation in [Operation::Read, Operation::Write] {
        assert_eq!(host.run_request(operation, 0, &pieces), IoStatus::DATA_TRANSFER_ERROR);
    }
    assert_eq!(host.run_request(Operation::Write, 0, &pieces[..1]), IoStatus::SUCCESS);
    host.write_and_verify(9, 8, 1);
    assert_eq!(host.controller().connection_stats().lost, 0);
}

#[test]
fn interrupted_kernel_buffer_request_is_retried_after_reconnect() {
    for turns in 0..8 {
        let mut host = SinglePathHost::with_queue(32);
        let leased = register_kernel_buffers_of(&host, REQUESTS);
        let bytes = pattern(turns, 200 * 512);
        let [from, to] = [request_segment(leased, 0, 200), request_segment(leased, 1, 200)];
        host.regions.store(from, &bytes).unwrap();
        assert_eq!(host.run_request(Operation::Write, 300, &[from]), IoStatus::SUCCESS);
        assert!(host.submit(0, Operation::Write, 0, &[from], 1));
        assert!(host.submit(0, Operation::Read, 300, &[to], 2));
        (0..turns).for_each(|_| host.step());
        host.target.cut();
        host.run_until(|host| host.completions.len() == 2);
        assert!(
            host.completions.drain(..).all(|completion| completion.status == IoStatus::SUCCESS)
        );
        assert!(load_host_memory(&host.regions, to) == bytes, "cut after {turns} turns");
        let place = host.buffer(0, 200);
        assert_eq!(host.run_request(Operation::Read, 0, &[place]), IoStatus::SUCCESS);
        assert!(load_host_memory(&host.regions, place) == bytes, "cut after {turns} turns");
    }
}

/// The kernel buffers have been withdrawn by their owner: this breaks a connection in the middle of a
/// PDU, and is identified as the cause.
#[test]
fn unregistered_kernel_buffer_fails_only_its_own_request() {
    for operation in [Operation::Write, Operation::Read] {
        let mut host = SinglePathHost::with_queue(32);
        let leased = register_kernel_buffers_of(&host, 2);
        let (gone, there) = (request_segment(leased, 3, 64), request_segment(leased, 1, 64));
        assert!(host.submit(0, operation, 0, &[gone], 1));
        assert!(host.submit(0, Operation::Read, 64, &[there], 2));
        host.run_until(|host| host.completions.len() == 2);
        for completion in host.completions.split_off(0) {
            let is_good = completion.status == IoStatus::SUCCESS;
            assert_eq!(is_good, completion.token == 2, "{operation:?}: {completion:?}");
        }
        host.write_and_verify(9, 8, 1);
    }
}
