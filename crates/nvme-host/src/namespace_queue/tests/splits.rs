//! Requests with more than one command.

use std::collections::BTreeMap;

use tenmil_base::{IoChannel, IoStatus, Operation, Random, Request, Segment};
use tenmil_wire::IoOpcode;

use super::{
    BLOCK, NOW, NamespaceQueueHarness, VIEW, block_count_of, read_request, request, segment,
    slba_of,
};
use crate::data_pointer::{DataPointerError, SglSupport};
use crate::fake_device::byte_addresses;
use crate::namespace_queue::{BlocksMax, Metadata, NamespaceView};
use crate::queue_link::QueueState;
use crate::queue_pair::{Injection, InjectionSide};

/// Checks the children of a request: in order, within the limits, and together exactly the requested
/// blocks and bytes.
fn check_split(view: NamespaceView, request: Request, segments: &[Segment], depth: u32) {
    let mut harness = NamespaceQueueHarness::new(view, depth);
    assert!(harness.submit(request, segments));
    let all = byte_addresses(segments);
    let boundary = u64::from(view.optimal_boundary_blocks);
    let (mut next, mut at) = (request.lba, 0);
    let mut completions = Vec::new();
    while next < request.lba + u64::from(request.blocks) {
        let command = *harness.device.fetched.front().expect("a child is out");
        let (lba, blocks) = (slba_of(&command), block_count_of(&command));
        assert_eq!(lba, next);
        let end = lba + u64::from(blocks);
        let crosses = (lba + 1..end).any(|at| at.checked_rem(boundary) == Some(0));
        assert!(!crosses, "{lba}..{end} crosses a multiple of {boundary}");
        let len = blocks * view.block_bytes();
        assert!(view.transfer_bytes_max == 0 || len <= view.transfer_bytes_max);
        let found = harness.dma.data_pointer_addresses(&command, u64::from(len), 4096);
        assert_eq!(found, all[at..at + len as usize], "{request:?}");
        (next, at) = (end, at + len as usize);
        assert_eq!(completions, [], "not before the last child");
        harness.device.complete_next(0);
        completions = harness.poll();
    }
    assert_eq!(completions, [(request.token, IoStatus::SUCCESS)]);
    assert_eq!((at, harness.namespace.queue().in_flight()), (all.len(), 0));
}

#[test]
fn children_cover_their_request_exactly_and_keep_every_limit() {
    for transfer_blocks in [0, 1, 3, 8, 16] {
        for optimal_boundary_blocks in [0, 1, 6, 8] {
            let transfer_bytes_max = transfer_blocks * BLOCK;
            let view = NamespaceView { transfer_bytes_max, optimal_boundary_blocks, ..VIEW };
            for lba in [0, 5, 7, 8, 1 << 33] {
                for blocks in [1, 2, 7, 8, 9, 17, 40] {
                    let whole = [segment(1, 512, blocks * BLOCK)];
                    check_split(view, read_request(lba, blocks, 1), &whole, 4);
                    check_split(view, request(Operation::Write, lba, blocks, 1), &whole, 32);
                }
            }
        }
    }
}

#[test]
fn abandoned_queue_waits_for_commands_in_flight_and_sends_none() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 4);
    assert!(harness.submit(read_request(0, 8, 1), &[segment(1, 0, 8 * BLOCK)]));
    let sent = harness.device.fetched.len();
    assert!((1..8).contains(&sent), "some of its children wait for slots");
    for _ in 0..sent {
        assert!(!harness.namespace.drain_discarding_completions(NOW));
        harness.device.complete_next(0);
    }
    assert!(harness.namespace.drain_discarding_completions(NOW));
    harness.device.fetch();
    assert!(harness.device.fetched.is_empty(), "the others never left");
}

#[test]
fn scattered_memory_is_split_where_prp_entries_cannot_go_on() {
    let parts = [
        segment(1, 0, 4096),
        segment(2, 4096, 8192),
        segment(3, 512, 1024),
        segment(4, 512, 3584),
        segment(4, 4096, 4096),
    ];
    let blocks = parts.iter().map(|part| part.len_bytes).sum::<u32>() / BLOCK;
    for sgl in [SglSupport::None, SglSupport::DwordAligned, SglSupport::Any] {
        for transfer_bytes_max in [0, 4096, 1536] {
            let view = NamespaceView { sgl, transfer_bytes_max, ..VIEW };
            for operation in [Operation::Read, Operation::Write, Operation::Compare] {
                check_split(view, request(operation, 9, blocks, 5), &parts, 8);
            }
        }
    }
}

#[test]
fn a_large_request_is_one_command_where_the_controller_allows() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 4);
    let blocks = (1 << 21) / BLOCK;
    let command =
        harness.submit_for_command(read_request(0, blocks, 1), &[segment(1, 4096, 1 << 21)]);
    assert_eq!(block_count_of(&command), blocks);
    let found = harness.dma.data_pointer_addresses(&command, 1 << 21, 4096);
    assert_eq!(found, byte_addresses(&[segment(1, 4096, 1 << 21)]));
    check_split(VIEW, read_request(0, blocks + 8, 1), &[segment(1, 4096, (1 << 21) + 4096)], 4);
}

#[test]
fn one_slot_suffices_for_a_request_of_many_children() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    check_split(view, read_request(0, 30, 1), &[segment(1, 0, 30 * BLOCK)], 2);
}

#[test]
fn commands_without_data_are_split_at_their_own_limits() {
    let blocks_max = BlocksMax {
        write_zeroes: 10,
        verify: 20,
        write_uncorrectable: 30,
        deallocate: 40,
        copy: 50,
        compare_and_write: 0,
    };
    for (operation, limit) in [
        (Operation::WriteZeroes, 10),
        (Operation::Verify, 20),
        (Operation::WriteUncorrectable, 30),
        (Operation::Deallocate, 40),
        (Operation::Copy, 50),
    ] {
        for blocks in [1, limit - 1, limit, limit + 1, 3 * limit, 3 * limit + 1] {
            let mut harness = NamespaceQueueHarness::new(NamespaceView { blocks_max, ..VIEW }, 4);
            assert!(harness.submit(request(operation, 7, blocks, 0), &[]));
            let (commands, completions) = harness.complete_all();
            assert_eq!(commands.len(), blocks.div_ceil(limit) as usize, "{operation:?} {blocks}");
            assert_eq!(completions, [(77, IoStatus::SUCCESS)]);
        }
    }
    let mut harness = NamespaceQueueHarness::new(VIEW, 8);
    assert!(harness.submit(request(Operation::WriteZeroes, 0, 3 << 16, 0), &[]));
    let blocks: Vec<u32> = harness.complete_all().0.iter().map(block_count_of).collect();
    assert_eq!(blocks, [1 << 16; 3], "what the field has room for is a limit as well");
}

#[test]
fn separate_metadata_goes_with_its_blocks() {
    let metadata = Metadata::Separate(8);
    let view = NamespaceView { metadata, transfer_bytes_max: 4 * BLOCK, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 8);
    // Ten blocks; their metadata in two pieces of three and seven blocks.
    let segments = [segment(1, 0, 10 * BLOCK), segment(2, 64, 24), segment(3, 128, 56)];
    let with_metadata = Request { metadata_count: 2, ..read_request(100, 10, 1) };
    assert!(harness.submit(with_metadata, &segments));
    let (commands, completions) = harness.complete_all();
    let seen: Vec<_> = commands
        .iter()
        .map(|command| (slba_of(command), block_count_of(command), command.mptr()))
        .collect();
    let (second, third) = ((3 << 32) + 64, (4 << 32) + 128);
    assert_eq!(seen, [(100, 3, second), (103, 4, third), (107, 3, third + 32)]);
    assert_eq!(completions, [(77, IoStatus::SUCCESS)]);

    assert_eq!(
        harness.submit_for_rejection(read_request(0, 10, 1), &segments),
        IoStatus::INVALID_FIELD
    );
    let short = [segments[0], segments[1], segment(3, 128, 55)];
    assert_eq!(harness.submit_for_rejection(with_metadata, &short), IoStatus::INVALID_FIELD);
    let odd = [segments[0], segment(2, 66, 80)];
    let with_odd = Request { metadata_count: 1, ..with_metadata };
    assert_eq!(harness.submit_for_rejection(with_odd, &odd), DataPointerError::Alignment.status());
}

#[test]
fn interleaved_metadata_follows_each_block() {
    let view = NamespaceView {
        metadata: Metadata::Interleaved(8),
        transfer_bytes_max: 2 * (BLOCK + 8),
        ..VIEW
    };
    check_split(view, read_request(0, 5, 1), &[segment(1, 0, 5 * (BLOCK + 8))], 4);
    assert_eq!(NamespaceQueueHarness::new(view, 4).namespace.limits().metadata_size, 0);
}

#[test]
fn misaligned_later_segment_completes_the_request_once() {
    let view = NamespaceView { transfer_bytes_max: 4096, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 8);
    let segments = [segment(1, 0, 8192), segment(2, 2, 4096)];
    assert!(harness.submit(read_request(0, 24, 2), &segments));
    let (commands, completions) = harness.complete_all();
    assert_eq!((commands.len(), completions), (2, vec![(77, IoStatus(0x13))]));
}

#[test]
fn a_third_large_request_waits_for_a_parent() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 4);
    let large = [segment(1, 0, 10 * BLOCK)];
    assert!(harness.submit(read_request(0, 10, 1), &large));
    assert!(!harness.submit(read_request(10, 10, 1), &large), "all slots are taken");
    let mut taken = 1;
    let mut completions = Vec::new();
    for _ in 0..60 {
        if !harness.device.fetched.is_empty() {
            harness.device.complete_next(0);
        }
        completions.extend(harness.poll());
        taken += usize::from(taken < 5 && harness.submit(read_request(10, 10, 1), &large));
        assert!(taken <= completions.len() + 2, "two parents");
    }
    assert_eq!((taken, completions.len()), (5, 5));
}

#[test]
fn worst_child_status_is_returned_and_stops_the_others() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 4);
    assert!(harness.submit(read_request(0, 10, 1), &[segment(1, 0, 10 * BLOCK)]));
    assert_eq!(harness.device.fetched.len(), 3);
    harness.device.complete_next(0);
    harness.device.complete_next(0x281);
    assert_eq!(harness.poll(), []);
    assert!(harness.device.fetched.len() <= 2, "nothing was sent after the failure");
    let (_, completions) = harness.complete_all();
    assert_eq!(completions, [(77, IoStatus::UNRECOVERED_READ)]);
}

#[test]
fn a_reset_returns_split_requests_once_and_sends_the_untouched_ones_afterwards() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 4);
    let large = [segment(1, 0, 10 * BLOCK)];
    assert!(harness.submit(Request { token: 1, ..read_request(0, 10, 1) }, &large));
    harness.device.complete_next(0);
    harness.controller.set_state(QueueState::Frozen);
    assert_eq!(harness.poll(), []);
    harness.controller.set_state(QueueState::Released);
    assert_eq!(harness.poll(), [(1, IoStatus::ABORTED_BY_HOST)]);
    assert_eq!(harness.poll(), []);
    harness.device.reset();
    harness.controller.run(None);
    assert!(harness.submit(Request { token: 2, ..read_request(0, 10, 1) }, &large));
    assert_eq!(harness.complete_all().1, [(2, IoStatus::SUCCESS)]);
}

#[test]
fn injected_error_reaches_a_child() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    for side in [InjectionSide::Submission, InjectionSide::Completion] {
        let mut harness = NamespaceQueueHarness::new(view, 4);
        let (opcode, status) = (IoOpcode::Read.code(), IoStatus::UNRECOVERED_READ);
        harness.namespace.queue_mut().arm_injection(Injection { opcode, side, status, count: 1 });
        assert!(harness.submit(read_request(0, 10, 1), &[segment(1, 0, 10 * BLOCK)]));
        assert_eq!(harness.complete_all().1, [(77, status)], "{side:?}");
        assert!(harness.submit(read_request(0, 10, 1), &[segment(1, 0, 10 * BLOCK)]));
        assert_eq!(harness.complete_all().1, [(77, IoStatus::SUCCESS)]);
    }
}

/// Requests of all sizes, completed in any order, some with errors: each token once, and a successful one
/// has covered its bytes.
#[test]
fn random_requests_complete_once_each() {
    let view = NamespaceView {
        transfer_bytes_max: 4 * BLOCK,
        optimal_boundary_blocks: 6,
        sgl: SglSupport::DwordAligned,
        ..VIEW
    };
    for seed in 1..40 {
        let mut random = Random::new(seed);
        let mut harness = NamespaceQueueHarness::new(view, 8);
        let mut owed = BTreeMap::new();
        for token in 0..400 {
            let blocks = 1 + u32::try_from(random.below(20)).unwrap();
            let lba = random.below(1000);
            let cut = 4 * u32::try_from(random.below(u64::from(blocks * BLOCK / 4))).unwrap();
            let segments = [segment(1, 0, cut), segment(2, 4, blocks * BLOCK - cut)];
            if harness.submit(Request { token, ..read_request(lba, blocks, 2) }, &segments) {
                owed.insert(token, blocks);
            }
            while random.chance(2, 3) && !harness.device.fetched.is_empty() {
                let count = harness.device.fetched.len() as u64;
                harness.device.fetched.swap(0, usize::try_from(random.below(count)).unwrap());
                harness.device.complete_next(if random.chance(1, 10) { 0x281 } else { 0 });
            }
            for (token, _) in harness.poll() {
                assert!(owed.remove(&token).is_some(), "seed {seed}: {token} came back twice");
            }
        }
        for (token, _) in harness.complete_all().1 {
            assert!(owed.remove(&token).is_some(), "seed {seed}: {token} came back twice");
        }
        assert!(owed.is_empty(), "seed {seed}: {owed:?}");
        assert_eq!(harness.namespace.queue().stats().invalid_completions, 0);
    }
}
