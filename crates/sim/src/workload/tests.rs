//! Tests of the workload directly on a medium, without a driver: its checks must detect media
//! faults.

use tenmil_base::{BlockDevice, Durability, Instant, IoChannel, IoStatus, Operation, Random, Span};

use super::{DataLayout, OperationMix, Workload, WorkloadProfile};
use crate::data_oracle::{DataMismatch, DataOracle};
use crate::fault_injector::FaultInjector;
use crate::sim_bus::SimBus;
use crate::sim_medium::{MediumFault, MediumOptions, PlannedMediumFault, SimMedium};
use crate::violation::Violation;

const PROFILE: WorkloadProfile = WorkloadProfile {
    count: 400,
    depth: 16,
    mix: OperationMix::ReadsAndWrites,
    blocks: (1, 8),
    span: 64,
    pieces: DataLayout::Whole,
};
const BLOCK: u32 = 1024;

struct WorkloadTest {
    bus: SimBus,
    medium: SimMedium,
    channel: Box<dyn IoChannel>,
    workload: Workload,
}

fn workload_test(profile: WorkloadProfile, options: MediumOptions, seed: u64) -> WorkloadTest {
    let mut random = Random::new(seed);
    let bus = SimBus::new(1 << 20, 1 << 12, FaultInjector::new(&[], random.fork())).unwrap();
    let options = MediumOptions { block_size: BLOCK, block_count: 128, ..options };
    let is_volatile = options.durability == Durability::VolatileCache;
    let medium = SimMedium::new(&bus, options, random.fork());
    let channel = medium.channel().unwrap();
    let oracle = DataOracle::new(seed, BLOCK as usize, is_volatile);
    let workload = Workload::new(&bus, profile, oracle, BLOCK, random.fork());
    WorkloadTest { bus, medium, channel, workload }
}

impl WorkloadTest {
    fn run_until_done(&mut self) -> Vec<Violation> {
        while !self.workload.is_done() && self.medium.is_powered() {
            self.workload.submit(&mut *self.channel);
            let wake = self.channel.wake_at();
            if wake == Instant::NEVER {
                break;
            }
            self.bus.with_state(|state| state.clock.jump_to(wake));
            self.workload.poll(self.bus.now(), &mut *self.channel);
        }
        self.reported_violations()
    }

    fn reported_violations(&self) -> Vec<Violation> {
        self.bus.with_state(|state| state.failures.clone())
    }

    fn read_back_all(&mut self) -> Vec<Violation> {
        self.workload.read_back_written_blocks();
        self.run_until_done()
    }
}

#[test]
fn conforming_medium_causes_no_violation() {
    for (seed, mix) in (0..).zip([
        OperationMix::Reads,
        OperationMix::Writes,
        OperationMix::ReadsAndWrites,
        OperationMix::Flushes,
        OperationMix::Everything,
    ]) {
        for pieces in [DataLayout::Whole, DataLayout::Offset, DataLayout::Pages] {
            let mut bench = workload_test(
                WorkloadProfile { mix, pieces, ..PROFILE },
                MediumOptions::default(),
                seed,
            );
            assert_eq!(bench.run_until_done(), [], "{mix:?} {pieces:?}");
            assert!(bench.workload.is_done(), "{mix:?} {pieces:?}");
            assert_eq!(bench.read_back_all(), [], "{mix:?} {pieces:?}");
            let counts = bench.workload.request_counts();
            assert!(counts.submitted >= PROFILE.count);
            assert!(counts.verified > 0);
            bench.workload.release_memory();
            assert_eq!(bench.bus.host_memory_pool().free_bytes(), 1 << 20);
        }
    }
}

#[test]
fn lost_torn_and_misdirected_writes_are_detected_by_kind() {
    let found = |fault| {
        let mischief =
            vec![PlannedMediumFault::for_operation(Operation::Write, fault).with_skip(20)];
        let options = MediumOptions { mischief, ..MediumOptions::default() };
        workload_test(PROFILE, options, 7).run_until_done()
    };
    let is = |found: &[Violation], wanted: fn(&DataMismatch) -> bool| {
        found.iter().any(
            |failure| matches!(failure, Violation::Data { complaint, .. } if wanted(complaint)),
        )
    };
    assert!(is(&found(MediumFault::LostWrite), |one| matches!(one, DataMismatch::Stale { .. })));
    let misdirected = found(MediumFault::Misdirect { by: 3 });
    assert!(is(&misdirected, |one| matches!(one, DataMismatch::Misplaced { .. })));
    assert!(is(&found(MediumFault::Tear), |one| matches!(one, DataMismatch::Torn { .. })));
}

#[test]
fn media_error_is_a_status_and_no_violation() {
    let mischief = vec![
        PlannedMediumFault::for_all_operations(MediumFault::Fail(IoStatus::INTERNAL_ERROR))
            .with_skip(5)
            .with_count(9),
    ];
    let mut bench =
        workload_test(PROFILE, MediumOptions { mischief, ..MediumOptions::default() }, 1);
    assert_eq!(bench.run_until_done(), []);
    assert_eq!(bench.workload.request_counts().failed, 9);
}

/// A power cut after every single request of a session: flushed data are never lost, and a medium
/// that ignores flushes is detected.
#[test]
fn flushed_blocks_survive_a_power_cut_unless_a_flush_was_ignored() {
    let profile = WorkloadProfile {
        count: 60,
        mix: OperationMix::Flushes,
        span: 16,
        blocks: (1, 4),
        ..PROFILE
    };
    let found_after_cut = |options: &MediumOptions, cut: u64| {
        let mut bench = workload_test(profile, options.clone(), cut);
        bench.medium.cut_power_after_requests(cut);
        assert_eq!(bench.run_until_done(), []);
        bench.medium.cut_power();
        bench.workload.handle_power_cut();
        bench.medium.restore_power();
        !bench.read_back_all().is_empty()
    };
    let honest = MediumOptions::default();
    assert!((1..60).all(|cut| !found_after_cut(&honest, cut)));
    let forgets = PlannedMediumFault::for_all_operations(MediumFault::ForgetFlush);
    let forgetful = MediumOptions { mischief: vec![forgets], ..MediumOptions::default() };
    let found = (1..60).filter(|cut| found_after_cut(&forgetful, *cut)).count();
    assert!(found > 20, "found {found} times");
    let tears = MediumOptions { tears: true, ..MediumOptions::default() };
    let torn = (1..60).filter(|cut| found_after_cut(&tears, *cut)).count();
    assert!(torn > 10, "found {torn} times");
}

#[test]
fn uncompleted_request_stays_outstanding_and_the_oldest_is_known() {
    let mischief =
        vec![PlannedMediumFault::for_all_operations(MediumFault::Stall).with_skip(3).with_count(2)];
    let latency = (Span::from_us(1), Span::from_us(1));
    let options = MediumOptions { mischief, latency, ..MediumOptions::default() };
    let mut bench = workload_test(WorkloadProfile { count: 20, ..PROFILE }, options, 1);
    assert_eq!(bench.run_until_done(), []);
    assert!(!bench.workload.is_done());
    assert_eq!(bench.workload.outstanding_requests(), 2);
    assert_eq!(bench.workload.oldest_outstanding().map(|(token, _)| token), Some(0x1_0003));
}
