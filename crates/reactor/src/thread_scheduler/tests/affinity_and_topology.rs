//! Masks, cpusets, quotas, NUMA nodes and siblings.

use tenmil_linux::CpuList;

use super::{
    MigrationReason, Options, ThreadScheduler, core_list, dynamic_options, migration_of,
    new_scheduler, plan_with_new_scheduler, seconds, snapshot,
};
use crate::thread_scheduler::SchedulerEvent;

#[test]
fn mask_is_obeyed_under_both_policies() {
    for options in [Options::default(), dynamic_options()] {
        let mut loads = snapshot(3, &[(0, 40), (1, 50)]);
        loads.threads[0].mask = Some(core_list("2"));
        loads.threads[1].mask = Some(core_list("1-2"));
        assert_eq!(
            plan_with_new_scheduler(options, &loads).migrations[0],
            migration_of(0, 0, 2, MigrationReason::Mask)
        );
    }
}

#[test]
fn threads_leave_an_offline_core() {
    for options in [Options::default(), dynamic_options()] {
        let mut scheduler = new_scheduler(options, 3);
        let mut loads = snapshot(3, &[(0, 60), (1, 50), (2, 25)]);
        loads.threads[2].mask = Some(core_list("2"));
        loads.reactors[1].taken = true;
        let found = scheduler.plan(seconds(0), &loads);
        assert_eq!(
            found.migrations,
            [migration_of(1, 1, 2, MigrationReason::CoreTaken)],
            "where it fits"
        );
        assert_eq!(found.events, [SchedulerEvent::CoreOffline { core: 1 }]);
        assert_eq!(found.empty, core_list("1"));
        assert_eq!(scheduler.plan(seconds(1), &loads).events, [], "reported once");
        loads.reactors[1].taken = false;
        assert_eq!(
            scheduler.plan(seconds(2), &loads).events,
            [SchedulerEvent::CoreOnline { core: 1 }]
        );
    }
}

#[test]
fn nothing_migrates_to_an_offline_core() {
    let mut loads = snapshot(2, &[(1, 10), (1, 50), (1, 50)]);
    loads.reactors[0].taken = true;
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &loads).migrations,
        [],
        "another core stands in for the scheduling core"
    );
}

#[test]
fn unsatisfiable_mask_is_reported_and_obeyed_again_once_possible() {
    let mut scheduler = new_scheduler(dynamic_options(), 4);
    let mut loads = snapshot(4, &[(0, 30), (3, 60), (1, 70)]);
    for (core, reactor) in (0..).zip(&mut loads.reactors) {
        reactor.node = Some(core / 2);
    }
    loads.threads[1].mask = Some(core_list("3"));
    loads.reactors[3].taken = true;
    let found = scheduler.plan(seconds(0), &loads);
    let unmatched = SchedulerEvent::AffinityUnsatisfied { thread: 1, mask: core_list("3") };
    assert_eq!(found.events, [SchedulerEvent::CoreOffline { core: 3 }, unmatched]);
    assert_eq!(
        found.migrations,
        [migration_of(1, 3, 2, MigrationReason::CoreTaken)],
        "the nearest core"
    );

    loads.threads[1].home = 2;
    assert_eq!(scheduler.plan(seconds(6), &loads).events, []);
    loads.reactors[3].taken = false;
    let found = scheduler.plan(seconds(12), &loads);
    assert_eq!(
        found.events,
        [SchedulerEvent::CoreOnline { core: 3 }, SchedulerEvent::AffinityRestored { thread: 1 }]
    );
    assert_eq!(found.migrations, [migration_of(1, 2, 3, MigrationReason::Mask)]);
}

#[test]
fn all_cores_offline_is_treated_as_none() {
    let mut scheduler = new_scheduler(dynamic_options(), 2);
    let mut loads = snapshot(2, &[(0, 10), (1, 10)]);
    for reactor in &mut loads.reactors {
        reactor.taken = true;
    }
    let found = scheduler.plan(seconds(0), &loads);
    assert!(found.events.contains(&SchedulerEvent::NoUsableCores));
    assert_eq!(found.migrations, [migration_of(1, 1, 0, MigrationReason::Idle)]);
    assert_eq!(scheduler.plan(seconds(1), &loads).events, []);
}

#[test]
fn busy_reactors_do_not_exceed_the_quota() {
    let mut loads = snapshot(4, &[(0, 30), (1, 45), (2, 45), (3, 30)]);
    loads.quota = Some(2.9);
    let found = plan_with_new_scheduler(dynamic_options(), &loads);
    assert_eq!(
        found.migrations,
        [
            migration_of(0, 0, 1, MigrationReason::Overload),
            migration_of(3, 3, 2, MigrationReason::Overload)
        ]
    );

    // Too much for one, but one is all there is.
    loads.quota = Some(0.5);
    let found = plan_with_new_scheduler(dynamic_options(), &loads);
    assert_eq!(found.empty.len(), 3, "{found:?}");
    let mut full = snapshot(2, &[(0, 50), (0, 50)]);
    full.quota = Some(1.0);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &full).migrations,
        [],
        "no reactor is woken to share a quota"
    );
}

#[test]
fn mask_takes_precedence_over_quota() {
    let mut loads = snapshot(2, &[(0, 30), (0, 30)]);
    loads.quota = Some(1.0);
    loads.threads[0].mask = Some(core_list("0"));
    loads.threads[1].mask = Some(core_list("1"));
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &loads).migrations,
        [migration_of(1, 0, 1, MigrationReason::Mask)]
    );
}

#[test]
fn thread_stays_on_its_numa_node_unless_limits_require_otherwise() {
    let on_nodes = |threads: &[(u32, u64)]| {
        let mut loads = snapshot(4, threads);
        for (core, reactor) in (0..).zip(&mut loads.reactors) {
            reactor.node = Some(core / 2);
        }
        for thread in &mut loads.threads {
            thread.node = Some(1);
        }
        loads
    };
    let near = on_nodes(&[(0, 30)]);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &near).migrations,
        [migration_of(0, 0, 2, MigrationReason::Node)]
    );
    let sheds = on_nodes(&[(2, 50), (2, 40)]);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &sheds).migrations,
        [migration_of(1, 2, 3, MigrationReason::Overload)]
    );
    let full = on_nodes(&[(2, 50), (2, 45), (3, 70)]);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &full).migrations,
        [migration_of(1, 2, 0, MigrationReason::Overload)]
    );
    let idle = on_nodes(&[(3, 5)]);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &idle).migrations,
        [migration_of(0, 3, 0, MigrationReason::Idle)]
    );
    let settled = on_nodes(&[(2, 60), (3, 60)]);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &settled).migrations,
        [],
        "not emptied into a core that is far"
    );
}

#[test]
fn core_with_idle_sibling_is_preferred() {
    let paired = |threads: &[(u32, u64)], pairs: [&str; 4]| {
        let mut loads = snapshot(4, threads);
        for (reactor, pair) in loads.reactors.iter_mut().zip(pairs) {
            reactor.siblings = core_list(pair);
        }
        loads
    };
    let pairs = ["0-1", "0-1", "2-3", "2-3"];
    let sheds = paired(&[(0, 50), (0, 50)], pairs);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &sheds).migrations,
        [migration_of(0, 0, 2, MigrationReason::Overload)]
    );
    let both = paired(&[(0, 60), (1, 60)], pairs);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &both).migrations,
        [migration_of(1, 1, 2, MigrationReason::Sibling)]
    );
    let all = paired(&[(0, 60), (1, 60), (2, 60), (3, 60)], pairs);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &all).migrations,
        [],
        "no core is better"
    );
    // 30 and 40 would fit side by side, but not with a sibling that takes a quarter of its 70.
    let pairs = ["0,2", "1,3", "0,2", "1,3"];
    let costly = paired(&[(0, 70), (1, 30), (2, 40), (3, 70)], pairs);
    assert_eq!(plan_with_new_scheduler(dynamic_options(), &costly).migrations, []);
}

#[test]
fn intermittently_idle_thread_does_not_alternate_between_nodes() {
    let mut scheduler = new_scheduler(dynamic_options(), 2);
    let (mut home, mut migrations) = (1, 0);
    for second in 0..200 {
        let mut loads = snapshot(2, &[(home, 18 + second / 10 % 2 * 5)]);
        for (core, reactor) in (0..).zip(&mut loads.reactors) {
            reactor.node = Some(core);
        }
        loads.threads[0].node = Some(1);
        for order in scheduler.plan(seconds(second), &loads).migrations {
            home = order.to;
            migrations += 1;
        }
    }
    assert_eq!((migrations, home), (1, 0));
}

#[test]
fn core_is_not_vacated_onto_one_with_a_busy_sibling() {
    let mut loads = snapshot(3, &[(0, 10), (1, 40), (2, 30)]);
    loads.threads[1].mask = Some(core_list("1"));
    loads.threads[2].mask = Some(core_list("0,2"));
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &loads).migrations,
        [migration_of(2, 2, 0, MigrationReason::Vacate)]
    );
    for core in 0..2 {
        loads.reactors[core].siblings = core_list("0-1");
    }
    assert_eq!(plan_with_new_scheduler(dynamic_options(), &loads).migrations, []);
}

#[test]
fn isolated_core_runs_only_threads_whose_mask_names_no_other() {
    let options = Options { isolated: core_list("0,3"), ..dynamic_options() };
    let mut loads = snapshot(4, &[(1, 10), (2, 10), (3, 5), (1, 50), (1, 30), (3, 0)]);
    loads.threads[2].mask = Some(core_list("0,3"));
    loads.threads[3].mask = Some(core_list("3"));
    loads.threads[4].mask = Some(core_list("1,3"));
    let found = plan_with_new_scheduler(options, &loads);
    let masked = [
        migration_of(3, 1, 3, MigrationReason::Mask),
        migration_of(5, 3, 1, MigrationReason::Mask),
    ];
    assert_eq!(found.migrations[..2], masked);
    assert_eq!(
        found.migrations[2..],
        [migration_of(1, 2, 1, MigrationReason::Idle)],
        "core 1 stands in for 0"
    );
    assert_eq!(found.empty, core_list("0,2"));
}

#[test]
fn new_threads_are_placed_round_robin_within_their_mask() {
    let options = Options { isolated: core_list("1"), ..Options::default() };
    let mut scheduler = ThreadScheduler::new(options, core_list("0-4")).unwrap();
    let (none, taken) = (CpuList::default(), core_list("3"));
    let mut placed: Vec<Option<u32>> =
        (0..5).map(|_| scheduler.choose_core_for_new_thread(None, &taken)).collect();
    assert_eq!(placed, [Some(0), Some(2), Some(4), Some(0), Some(2)]);
    placed = (0..3)
        .map(|_| scheduler.choose_core_for_new_thread(Some(&core_list("1-2,9")), &none))
        .collect();
    assert_eq!(placed, [Some(2), Some(2), Some(2)]);
    assert_eq!(scheduler.choose_core_for_new_thread(Some(&core_list("1")), &none), Some(1));
    assert_eq!(scheduler.choose_core_for_new_thread(Some(&core_list("3,9")), &taken), None);
}
