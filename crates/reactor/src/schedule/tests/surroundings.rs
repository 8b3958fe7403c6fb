//! Masks, cpusets, quotas, NUMA nodes and siblings.

use tenmil_linux::CpuList;

use super::{
    MigrationReason, Options, Scheduler, at, cores, dynamic, order, plan, scheduler, snapshot,
};
use crate::schedule::Event;

#[test]
fn a_mask_is_honoured_under_both_policies() {
    for options in [Options::default(), dynamic()] {
        let mut loads = snapshot(3, &[(0, 40), (1, 50)]);
        loads.threads[0].mask = Some(cores("2"));
        loads.threads[1].mask = Some(cores("1-2"));
        assert_eq!(plan(options, &loads).migrations[0], order(0, 0, 2, MigrationReason::Mask));
    }
}

#[test]
fn threads_leave_a_core_that_is_taken() {
    for options in [Options::default(), dynamic()] {
        let mut scheduler = scheduler(options, 3);
        let mut loads = snapshot(3, &[(0, 60), (1, 50), (2, 25)]);
        loads.threads[2].mask = Some(cores("2"));
        loads.reactors[1].taken = true;
        let found = scheduler.plan(at(0), &loads);
        assert_eq!(found.migrations, [order(1, 1, 2, MigrationReason::CoreTaken)], "where it fits");
        assert_eq!(found.events, [Event::CoreOffline { core: 1 }]);
        assert_eq!(found.empty, cores("1"));
        assert_eq!(scheduler.plan(at(1), &loads).events, [], "told once");
        loads.reactors[1].taken = false;
        assert_eq!(scheduler.plan(at(2), &loads).events, [Event::CoreOnline { core: 1 }]);
    }
}

#[test]
fn nothing_is_moved_to_a_core_that_is_taken() {
    let mut loads = snapshot(2, &[(1, 10), (1, 50), (1, 50)]);
    loads.reactors[0].taken = true;
    assert_eq!(
        plan(dynamic(), &loads).migrations,
        [],
        "another core stands in for the scheduling core"
    );
}

#[test]
fn a_mask_that_matches_nothing_is_told_and_honoured_again_when_it_can_be() {
    let mut scheduler = scheduler(dynamic(), 4);
    let mut loads = snapshot(4, &[(0, 30), (3, 60), (1, 70)]);
    for (core, reactor) in (0..).zip(&mut loads.reactors) {
        reactor.node = Some(core / 2);
    }
    loads.threads[1].mask = Some(cores("3"));
    loads.reactors[3].taken = true;
    let found = scheduler.plan(at(0), &loads);
    let unmatched = Event::AffinityUnsatisfied { thread: 1, mask: cores("3") };
    assert_eq!(found.events, [Event::CoreOffline { core: 3 }, unmatched]);
    assert_eq!(found.migrations, [order(1, 3, 2, MigrationReason::CoreTaken)], "the nearest core");

    loads.threads[1].home = 2;
    assert_eq!(scheduler.plan(at(6), &loads).events, []);
    loads.reactors[3].taken = false;
    let found = scheduler.plan(at(12), &loads);
    assert_eq!(
        found.events,
        [Event::CoreOnline { core: 3 }, Event::AffinityRestored { thread: 1 }]
    );
    assert_eq!(found.migrations, [order(1, 2, 3, MigrationReason::Mask)]);
}

#[test]
fn when_all_cores_are_taken_planning_goes_on_as_if_none_were() {
    let mut scheduler = scheduler(dynamic(), 2);
    let mut loads = snapshot(2, &[(0, 10), (1, 10)]);
    for reactor in &mut loads.reactors {
        reactor.taken = true;
    }
    let found = scheduler.plan(at(0), &loads);
    assert!(found.events.contains(&Event::NoUsableCores));
    assert_eq!(found.migrations, [order(1, 1, 0, MigrationReason::Idle)]);
    assert_eq!(scheduler.plan(at(1), &loads).events, []);
}

#[test]
fn no_more_reactors_are_busy_than_the_quota_has_processors() {
    let mut loads = snapshot(4, &[(0, 30), (1, 45), (2, 45), (3, 30)]);
    loads.quota = Some(2.9);
    let found = plan(dynamic(), &loads);
    assert_eq!(
        found.migrations,
        [order(0, 0, 1, MigrationReason::Overload), order(3, 3, 2, MigrationReason::Overload)]
    );

    // Too much for one, but one is all there is.
    loads.quota = Some(0.5);
    let found = plan(dynamic(), &loads);
    assert_eq!(found.empty.len(), 3, "{found:?}");
    let mut full = snapshot(2, &[(0, 50), (0, 50)]);
    full.quota = Some(1.0);
    assert_eq!(plan(dynamic(), &full).migrations, [], "nobody wakes another one to share a quota");
}

#[test]
fn a_mask_counts_for_more_than_a_quota() {
    let mut loads = snapshot(2, &[(0, 30), (0, 30)]);
    loads.quota = Some(1.0);
    loads.threads[0].mask = Some(cores("0"));
    loads.threads[1].mask = Some(cores("1"));
    assert_eq!(plan(dynamic(), &loads).migrations, [order(1, 0, 1, MigrationReason::Mask)]);
}

#[test]
fn a_thread_stays_near_its_memory_unless_the_limits_say_otherwise() {
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
    assert_eq!(plan(dynamic(), &near).migrations, [order(0, 0, 2, MigrationReason::Node)]);
    let sheds = on_nodes(&[(2, 50), (2, 40)]);
    assert_eq!(plan(dynamic(), &sheds).migrations, [order(1, 2, 3, MigrationReason::Overload)]);
    let full = on_nodes(&[(2, 50), (2, 45), (3, 70)]);
    assert_eq!(plan(dynamic(), &full).migrations, [order(1, 2, 0, MigrationReason::Overload)]);
    let idle = on_nodes(&[(3, 5)]);
    assert_eq!(plan(dynamic(), &idle).migrations, [order(0, 3, 0, MigrationReason::Idle)]);
    let settled = on_nodes(&[(2, 60), (3, 60)]);
    assert_eq!(plan(dynamic(), &settled).migrations, [], "not emptied into a core that is far");
}

#[test]
fn a_core_with_an_idle_sibling_is_preferred() {
    let paired = |threads: &[(u32, u64)], pairs: [&str; 4]| {
        let mut loads = snapshot(4, threads);
        for (reactor, pair) in loads.reactors.iter_mut().zip(pairs) {
            reactor.siblings = cores(pair);
        }
        loads
    };
    let pairs = ["0-1", "0-1", "2-3", "2-3"];
    let sheds = paired(&[(0, 50), (0, 50)], pairs);
    assert_eq!(plan(dynamic(), &sheds).migrations, [order(0, 0, 2, MigrationReason::Overload)]);
    let both = paired(&[(0, 60), (1, 60)], pairs);
    assert_eq!(plan(dynamic(), &both).migrations, [order(1, 1, 2, MigrationReason::Sibling)]);
    let all = paired(&[(0, 60), (1, 60), (2, 60), (3, 60)], pairs);
    assert_eq!(plan(dynamic(), &all).migrations, [], "no core is better");
    // 30 and 40 would fit side by side, but not with a sibling that takes a quarter of its 70.
    let pairs = ["0,2", "1,3", "0,2", "1,3"];
    let costly = paired(&[(0, 70), (1, 30), (2, 40), (3, 70)], pairs);
    assert_eq!(plan(dynamic(), &costly).migrations, []);
}

#[test]
fn a_thread_that_is_idle_now_and_then_does_not_go_to_and_fro_between_nodes() {
    let mut scheduler = scheduler(dynamic(), 2);
    let (mut home, mut migrations) = (1, 0);
    for second in 0..200 {
        let mut loads = snapshot(2, &[(home, 18 + second / 10 % 2 * 5)]);
        for (core, reactor) in (0..).zip(&mut loads.reactors) {
            reactor.node = Some(core);
        }
        loads.threads[0].node = Some(1);
        for order in scheduler.plan(at(second), &loads).migrations {
            home = order.to;
            migrations += 1;
        }
    }
    assert_eq!((migrations, home), (1, 0));
}

#[test]
fn a_core_is_not_emptied_into_one_with_a_busy_sibling() {
    let mut loads = snapshot(3, &[(0, 10), (1, 40), (2, 30)]);
    loads.threads[1].mask = Some(cores("1"));
    loads.threads[2].mask = Some(cores("0,2"));
    assert_eq!(plan(dynamic(), &loads).migrations, [order(2, 2, 0, MigrationReason::Vacate)]);
    for core in 0..2 {
        loads.reactors[core].siblings = cores("0-1");
    }
    assert_eq!(plan(dynamic(), &loads).migrations, []);
}

#[test]
fn an_isolated_core_is_for_those_who_name_nothing_else() {
    let options = Options { isolated: cores("0,3"), ..dynamic() };
    let mut loads = snapshot(4, &[(1, 10), (2, 10), (3, 5), (1, 50), (1, 30), (3, 0)]);
    loads.threads[2].mask = Some(cores("0,3"));
    loads.threads[3].mask = Some(cores("3"));
    loads.threads[4].mask = Some(cores("1,3"));
    let found = plan(options, &loads);
    let masked = [order(3, 1, 3, MigrationReason::Mask), order(5, 3, 1, MigrationReason::Mask)];
    assert_eq!(found.migrations[..2], masked);
    assert_eq!(
        found.migrations[2..],
        [order(1, 2, 1, MigrationReason::Idle)],
        "core 1 stands in for 0"
    );
    assert_eq!(found.empty, cores("0,2"));
}

#[test]
fn new_threads_go_round_the_reactors_of_their_mask() {
    let options = Options { isolated: cores("1"), ..Options::default() };
    let mut scheduler = Scheduler::new(options, cores("0-4")).unwrap();
    let (none, taken) = (CpuList::default(), cores("3"));
    let mut placed: Vec<Option<u32>> = (0..5).map(|_| scheduler.place(None, &taken)).collect();
    assert_eq!(placed, [Some(0), Some(2), Some(4), Some(0), Some(2)]);
    placed = (0..3).map(|_| scheduler.place(Some(&cores("1-2,9")), &none)).collect();
    assert_eq!(placed, [Some(2), Some(2), Some(2)]);
    assert_eq!(scheduler.place(Some(&cores("1")), &none), Some(1));
    assert_eq!(scheduler.place(Some(&cores("3,9")), &taken), None);
}
