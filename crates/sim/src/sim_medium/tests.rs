//! Tests of the medium through its channels.

use tenmil_base::{
    BlockDevice, CompletionBatch, Dma, Durability, Instant, IoChannel, IoStatus, Memory, Operation,
    Random, Request, RequestFlags, Segment,
};

use super::{MediumFault, MediumOptions, PlannedMediumFault, SimMedium};
use crate::fault_injector::FaultInjector;
use crate::host_memory::SimDma;
use crate::sim_bus::SimBus;

const BLOCK: u32 = 1024;

struct MediumTest {
    dma: SimDma,
    medium: SimMedium,
    channel: Box<dyn IoChannel>,
    buffer: Segment,
    bus: SimBus,
}

impl MediumTest {
    fn new(mischief: &[PlannedMediumFault]) -> Self {
        let bus = SimBus::new(1 << 16, 1 << 12, FaultInjector::new(&[], Random::new(1))).unwrap();
        let options = MediumOptions {
            block_size: BLOCK,
            mischief: mischief.to_vec(),
            ..MediumOptions::default()
        };
        let medium = SimMedium::new(&bus, options, Random::new(2));
        let dma = SimDma::new(&bus);
        let buffer = dma.allocate(BLOCK).unwrap();
        let channel = medium.channel().unwrap();
        Self { dma, medium, channel, buffer, bus }
    }

    fn submit(&mut self, token: u64, operation: Operation, lba: u64) {
        let has_data = matches!(operation, Operation::Read | Operation::Write | Operation::Compare);
        let request = Request {
            token,
            lba,
            operand: 0,
            blocks: u32::from(operation != Operation::Flush),
            segment_first: 0,
            segment_count: u16::from(has_data),
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        let now = self.bus.now();
        assert_eq!(self.channel.submit(now, &[request], &[self.buffer]), 1);
    }

    fn run_to_completions(&mut self) -> Vec<(u64, IoStatus)> {
        let mut completions = CompletionBatch::with_capacity(16);
        let mut all = Vec::new();
        while self.channel.wake_at() != Instant::NEVER {
            let wake = self.channel.wake_at();
            self.bus.with_state(|state| state.clock.jump_to(wake));
            self.channel.poll(self.bus.now(), &mut completions);
            all.extend(completions.drain().map(|completion| (completion.token, completion.status)));
        }
        all
    }

    fn run_request(&mut self, operation: Operation, lba: u64) -> IoStatus {
        self.submit(1, operation, lba);
        self.run_to_completions()[0].1
    }

    fn fill_block(&mut self, lba: u64, byte: u8) -> IoStatus {
        self.dma.fill(self.buffer, byte).unwrap();
        self.run_request(Operation::Write, lba)
    }

    fn read_first_and_last_byte(&mut self, lba: u64) -> (IoStatus, u8, u8) {
        self.dma.fill(self.buffer, 0xff).unwrap();
        let status = self.run_request(Operation::Read, lba);
        let mut bytes = [0; BLOCK as usize];
        self.dma.load(self.buffer, &mut bytes).unwrap();
        (status, bytes[0], bytes[BLOCK as usize - 1])
    }
}

const OK: IoStatus = IoStatus::SUCCESS;

#[test]
fn requests_complete_late_and_out_of_order() {
    let mut bench = MediumTest::new(&[]);
    (0..16).for_each(|token| bench.submit(token, Operation::Read, token));
    let mut completions = CompletionBatch::with_capacity(16);
    assert_eq!(bench.channel.poll(bench.bus.now(), &mut completions), 0, "not at once");
    let order: Vec<u64> = bench.run_to_completions().into_iter().map(|(token, _)| token).collect();
    assert_eq!(order.len(), 16);
    assert!(!order.is_sorted(), "{order:?}");
}

#[test]
fn each_operation_has_its_effect() {
    let mut bench = MediumTest::new(&[]);
    assert_eq!(bench.fill_block(3, 7), OK);
    assert_eq!(bench.read_first_and_last_byte(3), (OK, 7, 7));
    bench.dma.fill(bench.buffer, 7).unwrap();
    assert_eq!(bench.run_request(Operation::Compare, 3), OK);
    assert_eq!(bench.run_request(Operation::Compare, 4), IoStatus::COMPARE_FAILURE);
    assert_eq!(bench.run_request(Operation::WriteUncorrectable, 3), OK);
    assert_eq!(bench.run_request(Operation::Verify, 3), IoStatus::UNRECOVERED_READ);
    assert_eq!(bench.read_first_and_last_byte(3).0, IoStatus::UNRECOVERED_READ);
    assert_eq!(bench.run_request(Operation::WriteZeroes, 3), OK);
    assert_eq!(bench.read_first_and_last_byte(3), (OK, 0, 0));
    assert_eq!(bench.run_request(Operation::Read, 4096), IoStatus::LBA_OUT_OF_RANGE);
}

#[test]
fn flush_makes_data_persistent_and_a_lying_flush_does_not() {
    for (mischief, survives) in [
        (vec![], true),
        (
            vec![PlannedMediumFault::for_operation(Operation::Flush, MediumFault::ForgetFlush)],
            false,
        ),
    ] {
        let mut lost = 0;
        for lba in 0..20 {
            let mut bench = MediumTest::new(&mischief);
            bench.fill_block(lba, 7);
            assert_eq!(bench.run_request(Operation::Flush, 0), OK);
            bench.medium.cut_power();
            bench.medium.restore_power();
            lost += u32::from(bench.read_first_and_last_byte(lba).1 != 7);
            if !survives && lost > 0 {
                break;
            }
            // A different seed for the next power cut.
            bench.medium.lock().random = Random::new(lba);
        }
        assert_eq!(lost == 0, survives, "{mischief:?}: lost {lost}");
    }
}

#[test]
fn lost_torn_and_misdirected_writes_report_success() {
    let write = |fault| {
        MediumTest::new(&[PlannedMediumFault::for_operation(Operation::Write, fault).with_skip(1)])
    };
    let mut lost = write(MediumFault::LostWrite);
    assert_eq!((lost.fill_block(3, 1), lost.fill_block(3, 2)), (OK, OK));
    assert_eq!(lost.read_first_and_last_byte(3), (OK, 1, 1));
    let mut torn = write(MediumFault::Tear);
    assert_eq!((torn.fill_block(3, 1), torn.fill_block(3, 2)), (OK, OK));
    assert_eq!(torn.read_first_and_last_byte(3), (OK, 2, 1));
    let mut misdirected = write(MediumFault::Misdirect { by: 4 });
    assert_eq!((misdirected.fill_block(3, 1), misdirected.fill_block(3, 2)), (OK, OK));
    assert_eq!(
        (misdirected.read_first_and_last_byte(3), misdirected.read_first_and_last_byte(7)),
        ((OK, 1, 1), (OK, 2, 2))
    );
}

#[test]
fn power_cut_drops_all_requests_in_flight() {
    let mut bench = MediumTest::new(&[]);
    bench.medium.cut_power_after_requests(2);
    (0..8).for_each(|token| bench.submit(token, Operation::Write, token));
    assert_eq!(bench.run_to_completions().len(), 1, "the second was carried out and not answered");
    assert!(!bench.medium.is_powered());
    assert_eq!(bench.medium.in_flight_count(), 0);
    assert_eq!(bench.channel.submit(bench.bus.now(), &[], &[]), 0);
}

#[test]
fn stalled_requests_complete_after_faults_stop() {
    let mut bench =
        MediumTest::new(
            &[PlannedMediumFault::for_all_operations(MediumFault::Stall).with_count(1)],
        );
    bench.submit(1, Operation::Read, 0);
    bench.submit(2, Operation::Read, 1);
    assert_eq!(bench.run_to_completions(), [(2, OK)]);
    bench.medium.stop_faults();
    assert_eq!(bench.run_to_completions(), [(1, OK)]);
}

#[test]
fn medium_without_volatile_cache_keeps_every_write() {
    let mut bench = MediumTest::new(&[]);
    bench.medium.lock().options.durability = Durability::Persistent;
    bench.fill_block(3, 7);
    bench.medium.cut_power();
    bench.medium.restore_power();
    assert_eq!(bench.read_first_and_last_byte(3), (OK, 7, 7));
}

#[test]
fn dropping_a_channel_with_requests_panics() {
    let mut bench = MediumTest::new(&[]);
    bench.submit(1, Operation::Read, 0);
    drop(bench.channel);
    assert_eq!(bench.bus.with_state(|state| state.failures.len()), 1);
}
