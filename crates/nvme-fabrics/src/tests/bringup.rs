//! Connection setup and its results.

use tenmil_base::{IoStatus, Operation, Segment, Span};
use tenmil_nvme_host::Event;
use tenmil_nvme_tcp::{DigestMode, SuccessFlagPolicy};
use tenmil_sim::sim_network::NetworkOptions;
use tenmil_wire::Status;

use super::bed::Bed;
use super::target::{BLOCK, load, pattern};
use super::turning::Turning;
use crate::options::Options;
use crate::timeout_policy::TimeoutPolicy;

#[test]
fn a_controller_is_brought_up_through_its_registers_and_blocks_come_back_as_written() {
    let mut bed = Bed::with_queue(128);
    assert_eq!(bed.target.state().connects, [0, 1]);
    assert_eq!(bed.remote().cntlid(), 1);
    for (lba, blocks) in [(0, 1), (7, 8), (100, 16), (1000, 256), (2000, 1000)] {
        bed.exchange(lba, blocks, lba);
    }
}

#[test]
fn a_large_write_goes_in_small_portions_while_somebody_reads_beside_it_and_at_once_otherwise() {
    let mut bed = Bed::with_queue(32);
    bed.add_queue(32);
    let large = bed.place(0, 960);
    let turns = |bed: &mut Bed, reads: Option<(usize, Segment)>| {
        bed.turn_for(Span::from_ms(5));
        let (mut count, mut read) = (0, 0);
        if let Some((queue, memory)) = reads {
            assert!(bed.submit(queue, Operation::Read, 3_000, &[memory], 2));
            bed.turn_until(|bed| !bed.completions.is_empty());
        }
        assert!(bed.submit(0, Operation::Write, 0, &[large], 1));
        loop {
            let completions = std::mem::take(&mut bed.completions);
            assert!(completions.iter().all(|completion| completion.status == IoStatus::SUCCESS));
            if completions.iter().any(|completion| completion.token == 1) {
                if reads.is_some() && completions.len() == 1 {
                    bed.turn_until(|bed| bed.completions.pop().is_some());
                }
                return (count, read);
            }
            if let Some((queue, memory)) = reads.filter(|_| !completions.is_empty()) {
                read += 1;
                assert!(bed.submit(queue, Operation::Read, 3_000, &[memory], 2));
            }
            bed.turn();
            count += 1;
        }
    };
    let (calm, _) = turns(&mut bed, None);
    // 480 KiB are eight portions of 64, and each is followed by an iteration for other requests only.
    for queue in [0, 1] {
        let small = bed.place(200, 8);
        let (hurried, read) = turns(&mut bed, Some((queue, small)));
        assert!(hurried >= calm + 11, "{hurried} turns beside queue {queue}, and {calm} alone");
        assert!(read >= 3, "{read} reads beside queue {queue}");
        let large = bed.place(15, 64);
        let (calm_too, _) = turns(&mut bed, Some((queue, large)));
        assert!(calm_too <= calm + 4, "{calm_too} turns beside large reads, and {calm} alone");
    }
}

#[test]
fn the_smallest_admin_queue_that_a_target_may_offer_is_enough() {
    let mut bed = Bed::new();
    bed.target.state().admin_entries = 31;
    let error = bed.call(Bed::options()).unwrap_err().text;
    assert_eq!(
        error,
        "connect to the target: Connect was refused: byte 44 of its command is refused"
    );
    let mut bed = Bed::with_queue(128);
    assert_eq!(bed.target.state().admin_entries, 32);
    bed.exchange(0, 8, 1);
}

#[test]
fn an_old_discovery_service_that_does_not_say_what_it_is_is_known_by_its_name() {
    let mut bed = Bed::new();
    let old = bed.target.state().identity.clone().with(|id| id.sqes(0).cqes(0).nn(0));
    bed.target.state().identity = old;
    let options = Options { subsystem: tenmil_wire::nqn::DISCOVERY.to_owned(), ..Bed::options() };
    let mut remote = bed.call_controller(options).unwrap();
    bed.await_event(&mut remote, &Event::Ready);
}

#[test]
fn data_in_many_pieces_are_gathered_and_scattered() {
    let mut bed = Bed::with_queue(32);
    let block = u32::try_from(BLOCK).unwrap();
    let whole = bed.place(0, 64);
    for len in [block, 3 * block, 16 * block] {
        let pieces: Vec<_> = (0..8)
            .map(|index| whole.slice(index * 4 * block + index * 4, len.min(4 * block)).unwrap())
            .collect();
        let bytes = pattern(len.into(), pieces.iter().map(|piece| piece.len_bytes as usize).sum());
        let mut rest = bytes.as_slice();
        for piece in &pieces {
            use tenmil_base::Memory as _;
            let (part, more) = rest.split_at(piece.len_bytes as usize);
            bed.regions.store(*piece, part).unwrap();
            rest = more;
        }
        assert_eq!(bed.run(Operation::Write, 5, &pieces), IoStatus::SUCCESS);
        assert!(bed.target.state().disk.lock().unwrap()[5 * BLOCK..][..bytes.len()] == bytes);
        let back: Vec<_> = pieces.iter().rev().copied().collect();
        assert_eq!(bed.run(Operation::Read, 5, &back), IoStatus::SUCCESS);
        let found: Vec<u8> = back.iter().flat_map(|piece| load(&bed.regions, *piece)).collect();
        assert!(found == bytes, "{len} bytes a piece");
    }
}

#[test]
fn with_digests_and_without_in_pieces_of_any_length_all_is_the_same() {
    for digest in [DigestMode::Off, DigestMode::Required] {
        for success in [SuccessFlagPolicy::Never, SuccessFlagPolicy::WithoutFlowControl] {
            for seed in 0..4 {
                let mut bed = Bed::new();
                bed.target.state().network = NetworkOptions::with_splitting(seed);
                bed.target.state().config.success = success;
                let mut options = Bed::options();
                (options.header_digest, options.data_digest) = (digest, digest);
                bed.call(options).unwrap();
                bed.add_queue(16);
                bed.exchange(3, 8, seed);
                bed.exchange(300, 200, seed);
            }
        }
    }
}

#[test]
fn a_full_queue_takes_no_more_and_answers_all_once() {
    let mut bed = Bed::with_queue(8);
    bed.target.state().is_idle = true;
    let place = bed.place(0, 1);
    let taken = (0..20).filter(|token| bed.submit(0, Operation::Read, *token, &[place], *token));
    let taken: Vec<u64> = taken.collect();
    assert_eq!(taken, [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn queues_are_deleted_and_made_again() {
    let mut bed = Bed::with_queue(16);
    for round in 0..3 {
        bed.exchange(round, 1, round);
        bed.queues.clear();
        bed.events.clear();
        bed.turn_until(|bed| bed.events.contains(&Event::QueuePairDeleted { id: 1 }));
        bed.turn_until(|bed| bed.target.connections() == 1);
        bed.events.clear();
        bed.add_queue(16);
    }
}

#[test]
fn who_is_refused_is_told_why() {
    let cases = [
        (Status::CONNECT_INVALID_HOST.with_dnr(), "this host may not connect to that subsystem"),
        (Status::CONNECT_INVALID_PARAMETERS.with_dnr(), "byte 0 of its command is refused"),
    ];
    for (status, expected) in cases {
        let mut bed = Bed::new();
        bed.target.state().refuses = Some(status);
        let error = bed.call(Bed::options()).unwrap_err().to_string();
        assert!(error.starts_with("connect to the target: Connect was refused:"), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let mut bed = Bed::new();
    bed.target.state().is_away = true;
    let error = bed.call(Bed::options()).unwrap_err().to_string();
    assert_eq!(error, "connect to the target: no listener");
    let mut bed = Bed::new();
    bed.target.state().is_silent = true;
    let begun = bed.now;
    let error = bed.call(Bed::options()).unwrap_err().to_string();
    assert_eq!(error, "connect to the target: no stream was opened within 5 s");
    assert!(bed.now.since(begun) < Span::from_secs(6));
    let mut options = Bed::options();
    options.subsystem = "disk".into();
    let error = bed.call(options).unwrap_err().to_string();
    assert!(error.starts_with("subsystem `disk`: NQN does not begin with"), "{error}");
}

#[test]
fn a_shutdown_is_said_over_the_wire_and_leaves_nothing_behind() {
    let mut bed = Bed::new();
    let free = bed.free_bytes();
    bed.call(Bed::options()).unwrap();
    bed.add_queue(16);
    bed.exchange(0, 8, 1);
    bed.queues.clear();
    bed.shut_down();
    assert!(bed.events.contains(&Event::ShutDown { is_clean: true }), "{:?}", bed.events);
    assert_eq!(bed.target.connections(), 0);
    bed.multipath = None;
    assert_eq!(bed.free_bytes(), free);
}

#[test]
fn dropping_it_closes_everything() {
    let mut bed = Bed::with_queue(16);
    bed.exchange(0, 8, 1);
    bed.queues.clear();
    bed.multipath = None;
    bed.turn();
    assert_eq!(bed.target.connections(), 0);
}

#[test]
fn an_idle_connection_stays() {
    let mut bed = Bed::with_queue(16);
    let TimeoutPolicy { detect, .. } = TimeoutPolicy::default();
    bed.turn_for(Span { ns: 4 * detect.ns });
    bed.exchange(0, 8, 1);
    assert_eq!(bed.remote().counts().lost, 0);
}
