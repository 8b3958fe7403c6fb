//! Raw commands, other than requests.

use tenmil_base::{Instant, IoChannel, IoStatus, RequestFlags, Segment, Span};
use tenmil_wire::io::reservation::{AcquireAction, ReservationAcquire, ReservationType};
use tenmil_wire::typed::TypedCommand;
use tenmil_wire::{Command, Fuse, Status};

use super::{NOW, NamespaceQueueHarness, VIEW, block_count_of, read_request, segment, slba_of};
use crate::data_pointer::DataPointerError;
use crate::fake_device::byte_addresses;
use crate::namespace_queue::{BlockRange, CompareAndWrite, NamespaceView, RawSubmitError};
use crate::queue_link::QueueState;

#[test]
fn fused_pair_completes_once_with_its_cause() {
    let (compare, write) = ([segment(1, 0, 4096)], [segment(2, 0, 4096)]);
    for (first, second, expected) in [
        (0, 0, IoStatus::SUCCESS),
        (0x285, 0x09, IoStatus::COMPARE_FAILURE),
        (0, 0x280, IoStatus::WRITE_FAULT),
        (0x09, 0x280, IoStatus::WRITE_FAULT),
    ] {
        let mut harness = NamespaceQueueHarness::new(VIEW, 4);
        let blocks = BlockRange { lba: 64, blocks: 8 };
        let flags = RequestFlags::FUA;
        let pair = CompareAndWrite { blocks, compare: &compare, write: &write, flags };
        harness.namespace.submit_compare_and_write(NOW, 5, pair).unwrap();
        harness.namespace.flush_submissions();
        assert_eq!(harness.device.fetch(), 2);
        let [one, two] = [0, 1].map(|index| harness.device.fetched[index]);
        assert_eq!((one.opcode(), one.fuse(), one.prp1()), (0x05, Fuse::First, 2 << 32));
        assert_eq!((two.opcode(), two.fuse(), two.prp1()), (0x01, Fuse::Second, 3 << 32));
        assert_eq!(
            (slba_of(&one), slba_of(&two), block_count_of(&one), block_count_of(&two)),
            (64, 64, 8, 8)
        );
        harness.device.complete_next(first);
        assert_eq!(harness.poll(), []);
        harness.device.complete_next(second);
        assert_eq!(harness.poll(), [(5, expected)]);
    }
}

#[test]
fn fused_pair_is_rejected_as_a_whole() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 4);
    let page = [segment(1, 0, 4096)];
    let fused = |harness: &mut NamespaceQueueHarness, blocks, write: &[Segment]| {
        let (blocks, flags) = (BlockRange { lba: 0, blocks }, RequestFlags::NONE);
        let pair = CompareAndWrite { blocks, compare: &page, write, flags };
        harness.namespace.submit_compare_and_write(NOW, 5, pair)
    };
    let invalid = RawSubmitError::Refused(IoStatus::INVALID_FIELD);
    assert_eq!(fused(&mut harness, 9, &page), Err(invalid), "above the limit");
    assert_eq!(fused(&mut harness, 8, &[]), Err(invalid));
    assert_eq!(fused(&mut harness, 8, &[segment(1, 2, 4096)]).map_err(|_| ()), Err(()));
    harness.submit(read_request(0, 8, 1), &page);
    harness.submit(read_request(0, 8, 1), &page);
    assert_eq!(fused(&mut harness, 8, &page), Err(RawSubmitError::Full));
    assert_eq!(harness.complete_all().0.len(), 2, "no half was sent");
    for _ in 0..3 {
        assert_eq!(fused(&mut harness, 8, &page), Ok(()), "and no parent was lost");
        harness.namespace.flush_submissions();
        harness.device.fetch();
        assert_eq!(harness.complete_all().1.len(), 1);
    }
}

#[test]
fn raw_command_is_sent_unchanged() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 4);
    let command = Command::new(0x12).with_nsid(9).with_cdw10(1).with_cdw15(0xffff_ffff);
    let data = [segment(1, 0, 4096), segment(2, 0, 8192), segment(3, 0, 100)];
    let metadata = [segment(4, 8, 64)];
    harness.namespace.submit_raw(NOW, 5, command, &data, &metadata, None).unwrap();
    harness.namespace.flush_submissions();
    harness.device.fetch();
    let sent = harness.device.complete_next(0);
    assert_eq!(harness.poll(), [(5, IoStatus::SUCCESS)]);
    assert_eq!(harness.dma.data_pointer_addresses(&sent, 12_388, 4096), byte_addresses(&data));
    assert_eq!(sent.mptr(), (5 << 32) + 8);
    assert_eq!((sent.nsid(), sent.cdw10(), sent.cdw15()), (9, 1, u32::MAX));

    let own_pointer = command.with_prp(0x1000, 0x2000);
    harness.namespace.submit_raw(NOW, 6, own_pointer, &[], &[], None).unwrap();
    harness.namespace.flush_submissions();
    harness.device.fetch();
    let sent = harness.device.complete_next(0);
    assert_eq!((sent.prp1(), sent.prp2(), sent.mptr()), (0x1000, 0x2000, 0));
}

#[test]
fn reservation_sends_keys_and_returns_conflict() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 4);
    let acquire = ReservationAcquire {
        nsid: 1,
        racqa: AcquireAction::Preempt,
        rtype: ReservationType::ExclusiveAccess,
        ..ReservationAcquire::default()
    };
    let keys = [segment(1, 64, 16)];
    harness.namespace.submit_raw(NOW, 5, acquire.to_command(), &keys, &[], None).unwrap();
    harness.namespace.flush_submissions();
    harness.device.fetch();
    let conflict = Status::RESERVATION_CONFLICT.0;
    let sent = harness.device.complete_next(conflict);
    assert_eq!(harness.poll(), [(5, IoStatus(conflict))]);
    assert_eq!(ReservationAcquire::parse(&sent), Ok(acquire));
    assert_eq!(harness.dma.data_pointer_addresses(&sent, 16, 4096), byte_addresses(&keys));
}

#[test]
fn raw_command_that_cannot_be_sent_returns_the_reason() {
    let view = NamespaceView { transfer_bytes_max: 8192, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 2);
    let command = Command::new(0x02);
    let raw =
        |harness: &mut NamespaceQueueHarness, command, data: &[Segment], metadata: &[Segment]| {
            harness.namespace.submit_raw(NOW, 1, command, data, metadata, None)
        };
    let misaligned = RawSubmitError::Memory(DataPointerError::Alignment);
    let refused = [
        (raw(&mut harness, command.with_fuse(Fuse::First), &[], &[]), RawSubmitError::Fused),
        (
            raw(&mut harness, command, &[segment(1, 0, 8193)], &[]),
            RawSubmitError::TooLarge { bytes_max: 8192 },
        ),
        (raw(&mut harness, command, &[segment(1, 1, 512)], &[]), misaligned),
        (raw(&mut harness, command, &[segment(1, 0, 512), segment(2, 0, 512)], &[]), misaligned),
        (raw(&mut harness, command, &[], &[segment(1, 0, 8), segment(2, 0, 8)]), misaligned),
        (
            raw(&mut harness, command, &[segment(100, 0, 512)], &[]),
            RawSubmitError::Memory(DataPointerError::Unreachable),
        ),
    ];
    for (found, expected) in refused {
        assert_eq!(found, Err(expected));
        assert!(expected.to_string().starts_with("submit a command: "), "{expected}");
    }
    assert_eq!(raw(&mut harness, command, &[], &[]), Ok(()));
    assert_eq!(raw(&mut harness, command, &[], &[]), Err(RawSubmitError::Full));
    harness.controller.set_state(QueueState::Dead);
    harness.poll();
    assert_eq!(raw(&mut harness, command, &[], &[]), Err(RawSubmitError::Dead));
}

#[test]
fn a_raw_command_has_its_own_deadline() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 4);
    let (ms, command) = (Span::from_ms(10), Command::new(0x12));
    harness.poll();
    harness.namespace.submit_raw(NOW, 1, command, &[], &[], Some(ms)).unwrap();
    let now = Instant { ns: 20_000_000 };
    harness.namespace.poll(now, &mut harness.completions);
    assert!(harness.controller.next_timeout().is_some());
}
