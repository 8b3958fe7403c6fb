//! CPU time of idle emulated SSDs. In a process of its own: it is the process's time that is
//! measured.

use tenmil_base::Span;
use tenmil_bench::perf::perf_options::FastPathSwitches;
use tenmil_devices::EmuSpec;
use tenmil_devices::emu::{EmuPlan, EmulatedSsds};
use tenmil_linux::process_stats::ProcessStats;
use tenmil_linux::{Clock, Sleeper};

/// How long nothing happens. A part of it is what falling asleep costs.
const IDLE: Span = Span::from_ms(1500);

#[test]
fn idle_ssds_use_less_than_one_percent_of_a_cpu() {
    let clock = Clock::start();
    let specs: Vec<EmuSpec> = ["emu:null?count=3", "emu:ram?size=1m", "emu:model:p4600?size=1m"]
        .map(|uri| uri.parse().unwrap())
        .into();
    let techniques = FastPathSwitches::default();
    let plan = EmuPlan {
        specs: &specs,
        queue_pairs: 2,
        depth: 8,
        buffer_bytes: 4096,
        techniques: &techniques,
        device_cores: &[None, None],
        yields: false,
        interrupts: true,
        fills: false,
        seed: 1,
    };
    let mut emulated = EmulatedSsds::start(&plan, &clock).unwrap();
    let queues: Vec<_> = (0..5)
        .map(|ssd| emulated.create_queue_pair(ssd, 8, &techniques, &clock).unwrap())
        .collect();
    // The commands of the bring-up have been answered; who is still awake falls asleep soon.
    let mut sleeper = Sleeper::new().unwrap();
    let (before, begun) = (ProcessStats::read().cpu_time, clock.now());
    while clock.now().since(begun) < IDLE {
        // The host looks after its controllers when they want it, and otherwise sleeps.
        emulated.poll_controllers(clock.now()).unwrap();
        let until = emulated.wake_at().min(begun.after(IDLE));
        sleeper.sleep_until_ready(until.since(clock.now()), &mut Vec::new());
    }
    let used = Span { ns: ProcessStats::read().cpu_time.ns - before.ns };
    println!("5 SSDs on 2 threads used {used} in {IDLE}");
    assert!(used.ns < IDLE.ns / 100, "{used} in {IDLE}");
    drop(queues);
    emulated.shut_down(&clock);
}
