//! The workload straight over a medium, with no driver in between: what is found here is found.

use base::{Backend, Durability, Instant, Medium, Operation, Outcome, Random, Span};

use super::{Mix, Pieces, Profile, Workload};
use crate::bus::Bus;
use crate::evil::Evil;
use crate::failure::Failure;
use crate::medium::{MediumFault, MediumMischief, MediumOptions, SimMedium};
use crate::oracle::{Complaint, Oracle};

const PROFILE: Profile = Profile {
    count: 400,
    depth: 16,
    mix: Mix::ReadsAndWrites,
    blocks: (1, 8),
    span: 64,
    pieces: Pieces::Whole,
};
const BLOCK: u32 = 1024;

struct Bench {
    bus: Bus,
    medium: SimMedium,
    channel: Box<dyn Backend>,
    workload: Workload,
}

fn bench(profile: Profile, options: MediumOptions, seed: u64) -> Bench {
    let mut random = Random::new(seed);
    let bus = Bus::new(1 << 20, 1 << 12, Evil::new(&[], random.fork())).unwrap();
    let options = MediumOptions { block_size: BLOCK, block_count: 128, ..options };
    let is_volatile = options.durability == Durability::VolatileCache;
    let medium = SimMedium::new(&bus, options, random.fork());
    let channel = medium.channel().unwrap();
    let oracle = Oracle::new(seed, BLOCK as usize, is_volatile);
    let workload = Workload::new(&bus, profile, oracle, BLOCK, random.fork());
    Bench { bus, medium, channel, workload }
}

impl Bench {
    fn run(&mut self) -> Vec<Failure> {
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

    fn failures(&self) -> Vec<Failure> {
        self.bus.with(|state| state.failures.clone())
    }

    fn review(&mut self) -> Vec<Failure> {
        self.workload.review();
        self.run()
    }
}

#[test]
fn a_good_medium_answers_everything_and_nothing_is_found() {
    for (seed, mix) in
        (0..).zip([Mix::Reads, Mix::Writes, Mix::ReadsAndWrites, Mix::Flushes, Mix::Everything])
    {
        for pieces in [Pieces::Whole, Pieces::Offset, Pieces::Pages] {
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
        let mischief = vec![MediumMischief::on(Operation::Write, fault).skip(20)];
        let options = MediumOptions { mischief, ..MediumOptions::default() };
        bench(PROFILE, options, 7).run()
    };
    let is = |found: &[Failure], wanted: fn(&Complaint) -> bool| {
        found
            .iter()
            .any(|failure| matches!(failure, Failure::Data { complaint, .. } if wanted(complaint)))
    };
    assert!(is(&found(MediumFault::Lose), |one| matches!(one, Complaint::Stale { .. })));
    let misdirected = found(MediumFault::Misdirect { by: 3 });
    assert!(is(&misdirected, |one| matches!(one, Complaint::Misplaced { .. })));
    assert!(is(&found(MediumFault::Tear), |one| matches!(one, Complaint::Torn { .. })));
}

#[test]
fn an_error_of_the_medium_is_an_outcome_and_no_failure() {
    let mischief =
        vec![MediumMischief::always(MediumFault::Fail(Outcome::INTERNAL_ERROR)).skip(5).times(9)];
    let mut bench = bench(PROFILE, MediumOptions { mischief, ..MediumOptions::default() }, 1);
    assert_eq!(bench.run(), []);
    assert_eq!(bench.workload.counts().failed, 9);
}

/// A power cut after every single request of a session: nothing that was flushed is ever lost, and
/// a medium that forgets its flushes is found.
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
    let forgets = MediumMischief::always(MediumFault::ForgetFlush);
    let forgetful = MediumOptions { mischief: vec![forgets], ..MediumOptions::default() };
    let found = (1..60).filter(|cut| found_after_cut(&forgetful, *cut)).count();
    assert!(found > 20, "found {found} times");
    let tears = MediumOptions { tears: true, ..MediumOptions::default() };
    let torn = (1..60).filter(|cut| found_after_cut(&tears, *cut)).count();
    assert!(torn > 10, "found {torn} times");
}

#[test]
fn what_is_never_answered_stays_outstanding_and_the_oldest_is_known() {
    let mischief = vec![MediumMischief::always(MediumFault::Stall).skip(3).times(2)];
    let latency = (Span::from_us(1), Span::from_us(1));
    let options = MediumOptions { mischief, latency, ..MediumOptions::default() };
    let mut bench = bench(Profile { count: 20, ..PROFILE }, options, 1);
    assert_eq!(bench.run(), []);
    assert!(!bench.workload.is_done());
    assert_eq!(bench.workload.outstanding(), 2);
    assert_eq!(bench.workload.oldest().map(|(token, _)| token), Some(0x1_0003));
}
