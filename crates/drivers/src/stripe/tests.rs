//! Tests of stripes beyond the conformance tests of every device.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, BlockExtent, CompletionBatch, Durability, ExtentKind, Instant, IoChannel,
    IoStatus, Memory, Operation, OperationSet, Request, RequestFlags, Segment,
};
use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

use super::StripeDevice;
use crate::conformance::PartialAcceptDevice;
use crate::{NullDevice, RamDevice};

fn named_legs(media: Vec<Arc<dyn BlockDevice>>) -> Vec<(String, Arc<dyn BlockDevice>)> {
    media.into_iter().zip(0..).map(|(medium, n)| (format!("leg{n}"), medium)).collect()
}

fn null_leg(block_size: u32, blocks: u64) -> Arc<dyn BlockDevice> {
    Arc::new(NullDevice::new(block_size, blocks).unwrap())
}

fn request(operation: Operation, token: u64, lba: u64, blocks: u32) -> Request {
    Request {
        token,
        lba,
        operand: 0,
        segment_first: 0,
        blocks,
        segment_count: 1,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

#[test]
fn stripe_limits_are_those_of_the_weakest_leg() {
    let regions = RegionTable::new(2);
    let ram: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&regions, 4096, 100).unwrap());
    let stripe =
        StripeDevice::new(named_legs(vec![null_leg(4096, 1 << 20), ram]), 64 << 10).unwrap();
    let limits = stripe.limits();
    assert_eq!((limits.block_count, limits.block_size), (2 * 96, 4096));
    assert_eq!(limits.optimal_boundary_blocks, 16);
    assert_eq!(limits.durability, Durability::NonPersistent);
    assert!(!limits.operations.has(Operation::Copy), "source and target may be on two legs");
    // 256 blocks that begin in the middle of a chunk are on 17 chunks, 9 of them on one leg.
    assert_eq!((limits.request_blocks_max, limits.segments_max), (256, 257 - 8));
    assert_eq!(stripe.channels_max(), u32::MAX);
    let fine =
        StripeDevice::new(named_legs(vec![null_leg(512, 1 << 20), null_leg(512, 1 << 20)]), 512)
            .unwrap();
    // 255 blocks of one chunk each: at most 128 of them on one leg.
    let limits = fine.limits();
    assert_eq!((limits.request_blocks_max, limits.segments_max), (255, 257 - 127));
    let alone = StripeDevice::new(named_legs(vec![null_leg(4096, 64)]), 64 << 10).unwrap().limits();
    assert!(alone.operations.has(Operation::Copy));
    let mut expected = NullDevice::new(4096, 64).unwrap().limits();
    expected.operations =
        expected.operations.without(OperationSet::from_operations(&[Operation::CompareAndWrite]));
    assert_eq!(alone, expected);
}

#[test]
fn incompatible_stripe_legs_are_rejected_by_name() {
    let refused =
        |media, chunk| StripeDevice::new(named_legs(media), chunk).unwrap_err().to_string();
    assert_eq!(
        refused(vec![null_leg(512, 64), null_leg(4096, 64)], 65_536),
        "stripe: leg1 has blocks of 4096 bytes and leg0 of 512, expected the same on all legs"
    );
    assert_eq!(
        refused(vec![null_leg(512, 128), null_leg(512, 64)], 65_536),
        "stripe: leg1 has 64 blocks, expected at least a chunk of 128"
    );
    assert!(refused(Vec::new(), 4096).contains("stands on nothing"));
}

#[test]
fn each_stripe_leg_receives_only_its_chunks() {
    let regions = RegionTable::new(4);
    let rams = [(); 3].map(|()| Arc::new(RamDevice::new(&regions, 512, 64).unwrap()));
    let media = rams.iter().map(|ram| Arc::clone(ram) as Arc<dyn BlockDevice>).collect();
    let stripe = StripeDevice::new(named_legs(media), 1024).unwrap();
    let memory =
        regions.add_mapping(MemoryMapping::new(64 << 10, MemoryBacking::Private).unwrap()).unwrap();
    let block = |number: u32| memory.slice(number * 512, 512).unwrap();
    (0..24).for_each(|n| regions.fill(block(n), u8::try_from(n + 1).unwrap()).unwrap());
    let mut channel = stripe.channel().unwrap();
    let all = memory.slice(0, 24 * 512).unwrap();
    run_request(&mut *channel, request(Operation::Write, 1, 1, 24), all, IoStatus::SUCCESS);
    for (leg, ram) in rams.iter().enumerate() {
        let mut channel = ram.channel().unwrap();
        for row in 0..16_u64 {
            run_request(
                &mut *channel,
                request(Operation::Read, 1, row, 1),
                block(100),
                IoStatus::SUCCESS,
            );
            let mut bytes = [0; 512];
            regions.load(block(100), &mut bytes).unwrap();
            // Two blocks to a chunk, three legs.
            let lba = (row / 2 * 3 + leg as u64) * 2 + row % 2;
            let expected = if (1..25).contains(&lba) { u8::try_from(lba).unwrap() } else { 0 };
            assert!(bytes.iter().all(|byte| *byte == expected), "leg {leg} block {row}");
        }
    }
}

fn run_request(channel: &mut dyn IoChannel, request: Request, memory: Segment, expected: IoStatus) {
    let mut completions = CompletionBatch::with_capacity(2);
    assert_eq!(channel.submit(Instant::default(), &[request], &[memory]), 1);
    channel.flush_submissions();
    while channel.poll(Instant::default(), &mut completions) == 0 {}
    let statuses: Vec<_> =
        completions.drain().map(|completion| (completion.token, completion.status)).collect();
    assert_eq!(statuses, [(request.token, expected)]);
}

#[test]
fn stripe_leg_error_fails_the_request() {
    let regions = RegionTable::new(3);
    let rams = [(); 2].map(|()| Arc::new(RamDevice::new(&regions, 512, 64).unwrap()));
    let memory =
        regions.add_mapping(MemoryMapping::new(64 << 10, MemoryBacking::Private).unwrap()).unwrap();
    let media = rams.iter().map(|ram| Arc::clone(ram) as Arc<dyn BlockDevice>).collect();
    let mut channel = StripeDevice::new(named_legs(media), 1024).unwrap().channel().unwrap();
    let mut leg = rams[1].channel().unwrap();
    run_request(
        &mut *leg,
        request(Operation::WriteUncorrectable, 1, 2, 1),
        memory,
        IoStatus::SUCCESS,
    );
    let two = memory.slice(0, 1024).unwrap();
    let eight = memory.slice(0, 4096).unwrap();
    run_request(&mut *channel, request(Operation::Read, 2, 4, 2), two, IoStatus::SUCCESS);
    run_request(&mut *channel, request(Operation::Read, 3, 6, 2), two, IoStatus::UNRECOVERED_READ);
    run_request(
        &mut *channel,
        request(Operation::Read, 4, 0, 8),
        eight,
        IoStatus::UNRECOVERED_READ,
    );
    regions.fill(eight, 1).unwrap();
    run_request(
        &mut *channel,
        request(Operation::Compare, 5, 8, 8),
        eight,
        IoStatus::COMPARE_FAILURE,
    );
}

#[test]
fn requests_that_a_leg_does_not_accept_are_retried() {
    let regions = RegionTable::new(3);
    let ram = || -> Arc<dyn BlockDevice> { Arc::new(RamDevice::new(&regions, 512, 256).unwrap()) };
    let reluctant: Arc<dyn BlockDevice> = Arc::new(PartialAcceptDevice::new(ram(), 9));
    let memory =
        regions.add_mapping(MemoryMapping::new(64 << 10, MemoryBacking::Private).unwrap()).unwrap();
    let eight = memory.slice(0, 4096).unwrap();
    let mut channel =
        StripeDevice::new(named_legs(vec![ram(), reluctant]), 512).unwrap().channel().unwrap();
    let operations = [Operation::Write, Operation::Read, Operation::Flush, Operation::Verify];
    let requests: Vec<Request> = (0..2_000)
        .zip(operations.into_iter().cycle())
        .map(|(token, operation)| request(operation, token, token % 500, 8))
        .collect();
    let (mut sent, mut seen) = (0, vec![0; requests.len()]);
    let mut completions = CompletionBatch::with_capacity(16);
    while seen.iter().sum::<u32>() < 2_000 {
        sent += channel.submit(Instant::default(), &requests[sent..], &[eight]);
        channel.flush_submissions();
        channel.poll(Instant::default(), &mut completions);
        for completion in completions.drain() {
            assert_eq!(completion.status, IoStatus::SUCCESS);
            seen[usize::try_from(completion.token).unwrap()] += 1;
        }
    }
    assert!(seen.iter().all(|count| *count == 1));
}

#[test]
fn stripe_extent_ends_with_its_chunk() {
    let stripe =
        StripeDevice::new(named_legs(vec![null_leg(512, 64), null_leg(512, 64)]), 4096).unwrap();
    let data = |blocks| Ok(BlockExtent { blocks, kind: ExtentKind::Data });
    assert_eq!(stripe.block_status(3), data(5));
    assert_eq!(stripe.block_status(8), data(8));
    assert_eq!(stripe.block_status(127), data(1));
    assert_eq!(stripe.block_status(128), data(0));
}
