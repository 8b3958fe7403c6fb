//! Tests of the workload directly on a medium, without a driver: its checks must detect media
//! faults.

use tenmil_base::{BlockDevice, Durability, Instant, IoChannel, IoStatus, Operation, Random, Span};

use super::{DataLayout, Mix, Profile, Workload};
use crate::bus::Bus;
use crate::failure::Violation;
use crate::fault_injector::FaultInjector;
use crate::medium::{MediumFault, MediumOptions, PlannedMediumFault, SimMedium};
use crate::oracle::{DataMismatch, Oracle};

const PROFILE: Profile = Profile {
    count: 400,
    depth: 16,
    mix: Mix::ReadsAndWrites,
    blocks: (1, 8),
    span: 64,
    pieces: DataLayout::Whole,
};
const BLOCK: u32 = 1024;

struct Bench {
    bus: Bus,
    medium: SimMedium,
    channel: Box<dyn IoChannel>,
    workload: Workload,
}

fn bench(profile: Profile, options: MediumOptions, seed: u64) -> Bench {
    let mut random = Random::new(seed);
    let bus = Bus::new(1 << 20, 1 << 12, FaultInjector::new(&[], random.fork())).unwrap();
    let options = MediumOptions { block_size: BLOCK, block_count: 128, ..options };
    let is_volatile = options.durability == Durability::VolatileCache;
    let medium = SimMedium::new(&bus, options, random.fork());
    let channel = medium.channel().unwrap();
    let oracle = Oracle::new(seed, BLOCK as usize, is_volatile);
    let workload = Workload::new(&bus, profile, oracle, BLOCK, random.fork());
    Bench { bus, medium, channel, workload }
}

impl Bench {
    fn run(&mut self) -> Vec<Violation> {
        while !self.workload.is_done() && self.medium.is_powered() {
            self.workload.submit(&mut *self.channel);
            let wake = self.channel.wake_at();
            if wake == Instant::NEVER {
                break;
            }
            self.bus.with(|state| state.clock.jump(wake));
            self.workload.poll(self.bus.now(), &mut *self.channel);
        }
        self.failures()
    }

    fn failures(&self) -> Vec<Violation> {
        self.bus.with(|state| state.failures.clone())
    }

    fn review(&mut self) -> Vec<Violation> {
        self.workload.review();
        self.run()
    }
}

#[test]
fn a_good_medium_answers_everything_and_nothing_is_found() {
    for (seed, mix) in
        (0..).zip([Mix::Reads, Mix::Writes, Mix::ReadsAndWrites, Mix::Flushes, Mix::Everything])
    {
        for pieces in [DataLayout::Whole, DataLayout::Offset, DataLayout::Pages] {
            let mut bench =
                bench(Profile { mix, pieces, ..PROFILE }, MediumOptions::default(), seed);
            assert_eq!(bench.run(), [], "{mix:?} {pieces:?}");
            assert!(bench.workload.is_done(), "{mix:?} {pieces:?}");
            assert_eq!(bench.review(), [], "{mix:?} {pieces:?}");
            let counts = bench.workload.counts();
            assert!(counts.submitted >= PROFILE.count);
            assert!(counts.verified > 0);
            bench.workload.release();
            assert_eq!(bench.bus.pool().free_bytes(), 1 << 20);
        }
    }
}

#[test]
fn lost_torn_and_misdirected_writes_are_found_for_what_they_are() {
    let found = |fault| {
        let mischief = vec![PlannedMediumFault::on(Operation::Write, fault).skip(20)];
        let options = MediumOptions { mischief, ..MediumOptions::default() };
        bench(PROFILE, options, 7).run()
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
fn an_error_of_the_medium_is_an_outcome_and_no_failure() {
    let mischief = vec![
        PlannedMediumFault::always(MediumFault::Fail(IoStatus::INTERNAL_ERROR)).skip(5).times(9),
    ];
    let mut bench = bench(PROFILE, MediumOptions { mischief, ..MediumOptions::default() }, 1);
    assert_eq!(bench.run(), []);
    assert_eq!(bench.workload.counts().failed, 9);
}

/// A power cut after every single request of a session: flushed data are never lost, and a medium
/// that ignores flushes is detected.
#[test]
fn flushed_blocks_survive_a_cut_at_any_moment_unless_a_flush_was_forgotten() {
    let profile = Profile { count: 60, mix: Mix::Flushes, span: 16, blocks: (1, 4), ..PROFILE };
    let found_after_cut = |options: &MediumOptions, cut: u64| {
        let mut bench = bench(profile, options.clone(), cut);
        bench.medium.cut_power_after(cut);
        assert_eq!(bench.run(), []);
        bench.medium.cut_power();
        bench.workload.power_cut();
        bench.medium.restore_power();
        !bench.review().is_empty()
    };
    let honest = MediumOptions::default();
    assert!((1..60).all(|cut| !found_after_cut(&honest, cut)));
    let forgets = PlannedMediumFault::always(MediumFault::ForgetFlush);
    let forgetful = MediumOptions { mischief: vec![forgets], ..MediumOptions::default() };
    let found = (1..60).filter(|cut| found_after_cut(&forgetful, *cut)).count();
    assert!(found > 20, "found {found} times");
    let tears = MediumOptions { tears: true, ..MediumOptions::default() };
    let torn = (1..60).filter(|cut| found_after_cut(&tears, *cut)).count();
    assert!(torn > 10, "found {torn} times");
}

#[test]
fn what_is_never_answered_stays_outstanding_and_the_oldest_is_known() {
    let mischief = vec![PlannedMediumFault::always(MediumFault::Stall).skip(3).times(2)];
    let latency = (Span::from_us(1), Span::from_us(1));
    let options = MediumOptions { mischief, latency, ..MediumOptions::default() };
    let mut bench = bench(Profile { count: 20, ..PROFILE }, options, 1);
    assert_eq!(bench.run(), []);
    assert!(!bench.workload.is_done());
    assert_eq!(bench.workload.outstanding(), 2);
    assert_eq!(bench.workload.oldest().map(|(token, _)| token), Some(0x1_0003));
}
