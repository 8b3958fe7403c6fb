//! Data in kernel buffers: they have no address, and are transmitted all the same.

use tenmil_base::{IoStatus, Memory, Operation, Segment};
use tenmil_dma::{KernelBufferSource, MemoryBacking, MemoryMapping};

use super::bed::Bed;
use super::target::{load, pattern};
use super::turning::Turning;

/// Requests with data in kernel buffers, and their maximum length.
const REQUESTS: u16 = 4;
const EACH: u32 = 1 << 17;

fn data_at(_: u16, request: u16, byte: u32) -> u64 {
    u64::from(request) * u64::from(EACH) + u64::from(byte)
}

/// The data of requests in kernel buffers, whose owner copies from and to them on request.
fn lend(bed: &Bed, requests_there: u16) -> Segment {
    let len = usize::from(requests_there) * EACH as usize;
    let file = MemoryMapping::new(len, MemoryBacking::Shared).unwrap();
    let descriptor = file.descriptor().unwrap().try_clone_to_owned().unwrap();
    let lender = KernelBufferSource { descriptor, queue: 0, data_at };
    bed.regions.register_kernel_buffers(lender, (REQUESTS, EACH)).unwrap()
}

/// The first blocks of a request.
fn part(leased: Segment, request: u32, blocks: u32) -> Segment {
    leased.slice(request * EACH, blocks * 512).unwrap()
}

#[test]
fn what_was_lent_is_written_and_read() {
    let mut bed = Bed::with_queue(32);
    let leased = lend(&bed, REQUESTS);
    for (seed, blocks) in [(1, 1), (2, 7), (3, 8), (4, 40), (5, 200), (6, 256)] {
        let (from, to) = (part(leased, 1, blocks), part(leased, 3, blocks));
        let bytes = pattern(seed, from.len_bytes as usize);
        bed.regions.store(from, &bytes).unwrap();
        assert_eq!(bed.run(Operation::Write, 5, &[from]), IoStatus::SUCCESS);
        let place = bed.place(0, blocks);
        assert_eq!(bed.run(Operation::Read, 5, &[place]), IoStatus::SUCCESS);
        assert!(load(&bed.regions, place) == bytes, "{blocks} blocks were written");
        assert_eq!(bed.run(Operation::Read, 5, &[to]), IoStatus::SUCCESS);
        assert!(load(&bed.regions, to) == bytes, "{blocks} blocks were read");
        bed.exchange(9, blocks, seed + 100);
    }
}

#[test]
fn what_was_lent_and_what_was_not_go_beside_each_other() {
    let mut bed = Bed::with_queue(32);
    let leased = lend(&bed, REQUESTS);
    for round in 0..20_u64 {
        let bytes = pattern(round, 64 * 512);
        let place = |bed: &Bed, number: u64| match number % 2 {
            0 => part(leased, u32::try_from(number % 4).unwrap(), 64),
            _ => bed.place(number, 64),
        };
        let (from, lba) = (place(&bed, round), round * 64);
        bed.regions.store(from, &bytes).unwrap();
        assert_eq!(bed.run(Operation::Write, lba, &[from]), IoStatus::SUCCESS);
        // All of them are in flight at once.
        let into: Vec<Segment> = (0..4).map(|number| place(&bed, number)).collect();
        for (token, into) in (0..).zip(&into) {
            bed.regions.store(*into, &[0xee; 64 * 512]).unwrap();
            assert!(bed.submit(0, Operation::Read, lba, &[*into], token));
        }
        bed.turn_until(|bed| bed.completions.len() == 4);
        assert!(bed.completions.drain(..).all(|completion| completion.status == IoStatus::SUCCESS));
        for into in into {
            assert!(load(&bed.regions, into) == bytes, "round {round}, {into:?}");
        }
    }
}

/// A list would have to name each of its pieces by an address.
#[test]
fn a_list_of_what_was_lent_is_refused_and_nothing_else_is() {
    let mut bed = Bed::with_queue(32);
    let leased = lend(&bed, REQUESTS);
    let pieces = [part(leased, 0, 8), part(leased, 2, 8)];
    for operation in [Operation::Read, Operation::Write] {
        assert_eq!(bed.run(operation, 0, &pieces), IoStatus::DATA_TRANSFER_ERROR);
    }
    assert_eq!(bed.run(Operation::Write, 0, &pieces[..1]), IoStatus::SUCCESS);
    bed.exchange(9, 8, 1);
    assert_eq!(bed.remote().counts().lost, 0);
}

#[test]
fn what_a_cut_has_ended_goes_again_with_the_next_connection() {
    for turns in 0..8 {
        let mut bed = Bed::with_queue(32);
        let leased = lend(&bed, REQUESTS);
        let bytes = pattern(turns, 200 * 512);
        let [from, to] = [part(leased, 0, 200), part(leased, 1, 200)];
        bed.regions.store(from, &bytes).unwrap();
        assert_eq!(bed.run(Operation::Write, 300, &[from]), IoStatus::SUCCESS);
        assert!(bed.submit(0, Operation::Write, 0, &[from], 1));
        assert!(bed.submit(0, Operation::Read, 300, &[to], 2));
        (0..turns).for_each(|_| bed.turn());
        bed.target.cut();
        bed.turn_until(|bed| bed.completions.len() == 2);
        assert!(bed.completions.drain(..).all(|completion| completion.status == IoStatus::SUCCESS));
        assert!(load(&bed.regions, to) == bytes, "cut after {turns} turns");
        let place = bed.place(0, 200);
        assert_eq!(bed.run(Operation::Read, 0, &[place]), IoStatus::SUCCESS);
        assert!(load(&bed.regions, place) == bytes, "cut after {turns} turns");
    }
}

/// The kernel buffers have been withdrawn by their owner: this breaks a connection in the middle of a
/// PDU, and is identified as the cause.
#[test]
fn what_is_lent_no_more_fails_alone() {
    for operation in [Operation::Write, Operation::Read] {
        let mut bed = Bed::with_queue(32);
        let leased = lend(&bed, 2);
        let (gone, there) = (part(leased, 3, 64), part(leased, 1, 64));
        assert!(bed.submit(0, operation, 0, &[gone], 1));
        assert!(bed.submit(0, Operation::Read, 64, &[there], 2));
        bed.turn_until(|bed| bed.completions.len() == 2);
        for completion in bed.completions.split_off(0) {
            let is_good = completion.status == IoStatus::SUCCESS;
            assert_eq!(is_good, completion.token == 2, "{operation:?}: {completion:?}");
        }
        bed.exchange(9, 8, 1);
    }
}
