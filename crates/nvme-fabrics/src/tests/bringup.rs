//! Connection setup and its results.

use tenmil_base::{IoStatus, Operation, Segment, Span};
use tenmil_nvme_host::Event;
use tenmil_nvme_tcp::{DigestMode, SuccessFlagPolicy};
use tenmil_sim::sim_network::NetworkOptions;
use tenmil_wire::Status;

use super::simulated_time::SimulatedTime;
use super::single_path_host::SinglePathHost;
use super::target::{BLOCK, load_host_memory, pattern};
use crate::options::Options;
use crate::timeout_policy::TimeoutPolicy;

#[test]
fn controller_is_initialized_through_properties_and_reads_return_written_blocks() {
    let mut host = SinglePathHost::with_queue(128);
    assert_eq!(host.target.state().connects, [0, 1]);
    assert_eq!(host.controller().cntlid(), 1);
    for (lba, blocks) in [(0, 1), (7, 8), (100, 16), (1000, 256), (2000, 1000)] {
        host.write_and_verify(lba, blocks, lba);
    }
}

#[test]
fn large_write_is_sent_in_small_portions_only_beside_reads() {
    let mut host = SinglePathHost::with_queue(32);
    host.add_queue(32);
    let large = host.buffer(0, 960);
    let turns = |host: &mut SinglePathHost, reads: Option<(usize, Segment)>| {
        host.run_for(Span::from_ms(5));
        let (mut count, mut read) = (0, 0);
        if let Some((queue, memory)) = reads {
            assert!(host.submit(queue, Operation::Read, 3_000, &[memory], 2));
            host.run_until(|host| !host.completions.is_empty());
        }
        assert!(host.submit(0, Operation::Write, 0, &[large], 1));
        loop {
            let completions = std::mem::take(&mut host.completions);
            assert!(completions.iter().all(|completion| completion.status == IoStatus::SUCCESS));
            if completions.iter().any(|completion| completion.token == 1) {
                if reads.is_some() && completions.len() == 1 {
                    host.run_until(|host| host.completions.pop().is_some());
                }
                return (count, read);
            }
            if let Some((queue, memory)) = reads.filter(|_| !completions.is_empty()) {
                read += 1;
                assert!(host.submit(queue, Operation::Read, 3_000, &[memory], 2));
            }
            host.step();
            count += 1;
        }
    };
    let (calm, _) = turns(&mut host, None);
    // 480 KiB are eight portions of 64, and each is followed by an iteration for other requests only.
    for queue in [0, 1] {
        let small = host.buffer(200, 8);
        let (hurried, read) = turns(&mut host, Some((queue, small)));
        assert!(hurried >= calm + 11, "{hurried} turns beside queue {queue}, and {calm} alone");
        assert!(read >= 3, "{read} reads beside queue {queue}");
        let large = host.buffer(15, 64);
        let (calm_too, _) = turns(&mut host, Some((queue, large)));
        assert!(calm_too <= calm + 4, "{calm_too} turns beside large reads, and {calm} alone");
    }
}

#[test]
fn the_smallest_admin_queue_that_a_target_may_offer_is_enough() {
    let mut host = SinglePathHost::new();
    host.target.state().admin_entries = 31;
    let error = host.connect(SinglePathHost::options()).unwrap_err().text;
    assert_eq!(
        error,
        "connect to the target: Connect was refused: byte 44 of its command is refused"
    );
    let mut host = SinglePathHost::with_queue(128);
    assert_eq!(host.target.state().admin_entries, 32);
    host.write_and_verify(0, 8, 1);
}

#[test]
fn discovery_controller_without_cntrltype_is_recognized_by_its_nqn() {
    let mut host = SinglePathHost::new();
    let old = host.target.state().identity.clone().with(|id| id.sqes(0).cqes(0).nn(0));
    host.target.state().identity = old;
    let options =
        Options { subsystem: tenmil_wire::nqn::DISCOVERY.to_owned(), ..SinglePathHost::options() };
    let mut remote = host.connect_controller(options).unwrap();
    host.await_event(&mut remote, &Event::Ready);
}

#[test]
fn data_in_many_pieces_are_gathered_and_scattered() {
    let mut host = SinglePathHost::with_queue(32);
    let block = u32::try_from(BLOCK).unwrap();
    let whole = host.buffer(0, 64);
    for len in [block, 3 * block, 16 * block] {
        let pieces: Vec<_> = (0..8)
            .map(|index| whole.slice(index * 4 * block + index * 4, len.min(4 * block)).unwrap())
            .collect();
        let bytes = pattern(len.into(), pieces.iter().map(|piece| piece.len_bytes as usize).sum());
        let mut rest = bytes.as_slice();
        for piece in &pieces {
            use tenmil_base::Memory as _;
            let (part, more) = rest.split_at(piece.len_bytes as usize);
            host.regions.store(*piece, part).unwrap();
            rest = more;
        }
        assert_eq!(host.run_request(Operation::Write, 5, &pieces), IoStatus::SUCCESS);
        assert!(host.target.state().disk.lock().unwrap()[5 * BLOCK..][..bytes.len()] == bytes);
        let back: Vec<_> = pieces.iter().rev().copied().collect();
        assert_eq!(host.run_request(Operation::Read, 5, &back), IoStatus::SUCCESS);
        let found: Vec<u8> =
            back.iter().flat_map(|piece| load_host_memory(&host.regions, *piece)).collect();
        assert!(found == bytes, "{len} bytes a piece");
    }
}

#[test]
fn results_do_not_depend_on_digests_or_piece_lengths() {
    for digest in [DigestMode::Off, DigestMode::Required] {
        for success in [SuccessFlagPolicy::Never, SuccessFlagPolicy::WithoutFlowControl] {
            for seed in 0..4 {
                let mut host = SinglePathHost::new();
                host.target.state().network = NetworkOptions::with_splitting(seed);
                host.target.state().config.success = success;
                let mut options = SinglePathHost::options();
                (options.header_digest, options.data_digest) = (digest, digest);
                host.connect(options).unwrap();
                host.add_queue(16);
                host.write_and_verify(3, 8, seed);
                host.write_and_verify(300, 200, seed);
            }
        }
    }
}

#[test]
fn full_queue_rejects_requests_and_completes_each_once() {
    let mut host = SinglePathHost::with_queue(8);
    host.target.state().withholds_completions = true;
    let place = host.buffer(0, 1);
    let taken = (0..20).filter(|token| host.submit(0, Operation::Read, *token, &[place], *token));
    let taken: Vec<u64> = taken.collect();
    assert_eq!(taken, [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn queues_are_deleted_and_recreated() {
    let mut host = SinglePathHost::with_queue(16);
    for round in 0..3 {
        host.write_and_verify(round, 1, round);
        host.queues.clear();
        host.events.clear();
        host.run_until(|host| host.events.contains(&Event::QueuePairDeleted { id: 1 }));
        host.run_until(|host| host.target.open_connection_count() == 1);
        host.events.clear();
        host.add_queue(16);
    }
}

#[test]
fn rejected_connect_reports_the_reason() {
    let cases = [
        (Status::CONNECT_INVALID_HOST.with_dnr(), "this host may not connect to that subsystem"),
        (Status::CONNECT_INVALID_PARAMETERS.with_dnr(), "byte 0 of its command is refused"),
    ];
    for (status, expected) in cases {
        let mut host = SinglePathHost::new();
        host.target.state().refuses = Some(status);
        let error = host.connect(SinglePathHost::options()).unwrap_err().to_string();
        assert!(error.starts_with("connect to the target: Connect was refused:"), "{error}");
        assert!(error.contains(expected), "{error}");
    }
    let mut host = SinglePathHost::new();
    host.target.state().refuses_connections = true;
    let error = host.connect(SinglePathHost::options()).unwrap_err().to_string();
    assert_eq!(error, "connect to the target: no listener");
    let mut host = SinglePathHost::new();
    host.target.state().ignores_connections = true;
    let begun = host.now;
    let error = host.connect(SinglePathHost::options()).unwrap_err().to_string();
    assert_eq!(error, "connect to the target: no stream was opened within 5 s");
    assert!(host.now.since(begun) < Span::from_secs(6));
    let mut options = SinglePathHost::options();
    options.subsystem = "disk".into();
    let error = host.connect(options).unwrap_err().to_string();
    assert!(error.starts_with("subsystem `disk`: NQN does not begin with"), "{error}");
}

#[test]
fn shutdown_is_sent_to_the_target_and_leaks_nothing() {
    let mut host = SinglePathHost::new();
    let free = host.free_bytes();
    host.connect(SinglePathHost::options()).unwrap();
    host.add_queue(16);
    host.write_and_verify(0, 8, 1);
    host.queues.clear();
    host.shut_down();
    assert!(host.events.contains(&Event::ShutDown { is_clean: true }), "{:?}", host.events);
    assert_eq!(host.target.open_connection_count(), 0);
    host.multipath = None;
    assert_eq!(host.free_bytes(), free);
}

#[test]
fn dropped_multipath_closes_all_connections() {
    let mut host = SinglePathHost::with_queue(16);
    host.write_and_verify(0, 8, 1);
    host.queues.clear();
    host.multipath = None;
    host.step();
    assert_eq!(host.target.open_connection_count(), 0);
}

#[test]
fn idle_connection_is_kept() {
    let mut host = SinglePathHost::with_queue(16);
    let TimeoutPolicy { detect, .. } = TimeoutPolicy::default();
    host.run_for(Span { ns: 4 * detect.ns });
    host.write_and_verify(0, 8, 1);
    assert_eq!(host.controller().connection_stats().lost, 0);
}
