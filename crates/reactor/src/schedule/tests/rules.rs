//! Idle threads are collected, overloaded reactors relieved, and rest times obeyed.

use tenmil_base::Span;

use super::{
    MigrationReason, Options, Policy, at, cores, dynamic, order, plan, scheduler, snapshot,
};

#[test]
fn idle_threads_are_consolidated_on_the_scheduling_core() {
    let loads = snapshot(4, &[(0, 10), (1, 0), (2, 19), (3, 70)]);
    let found = plan(dynamic(), &loads);
    let consolidated =
        [order(1, 1, 0, MigrationReason::Idle), order(2, 2, 0, MigrationReason::Idle)];
    assert_eq!(found.migrations, consolidated);
    assert_eq!(found.empty, cores("1-2"));

    let elsewhere = plan(Options { scheduling_core: Some(2), ..dynamic() }, &loads);
    assert!(elsewhere.migrations.iter().all(|order| order.to == 2), "{elsewhere:?}");
    assert_eq!(elsewhere.empty, cores("0-1"));
}

#[test]
fn idle_threads_are_not_consolidated_beyond_the_limit() {
    let threads: Vec<(u32, u64)> = (0..8).map(|core| (core, 19)).collect();
    let found = plan(dynamic(), &snapshot(8, &threads));
    let consolidated = found.migrations.iter().filter(|order| order.to == 0).count();
    assert_eq!(
        consolidated, 2,
        "3 times 19 is 57, a fourth would leave less than 5 below 80: {found:?}"
    );
}

#[test]
fn an_idle_thread_is_consolidated_on_a_full_core_too() {
    let found = plan(dynamic(), &snapshot(2, &[(0, 100), (1, 0)]));
    assert_eq!(found.migrations, [order(1, 1, 0, MigrationReason::Idle)]);
}

#[test]
fn a_full_reactor_sheds_the_smallest_thread_that_is_enough() {
    let loads = snapshot(2, &[(0, 22), (0, 30), (0, 40), (1, 31)]);
    assert_eq!(plan(dynamic(), &loads).migrations, [order(0, 0, 1, MigrationReason::Overload)]);
    let loads = snapshot(2, &[(0, 5), (0, 40), (0, 45), (1, 31)]);
    assert_eq!(plan(dynamic(), &loads).migrations, [order(1, 0, 1, MigrationReason::Overload)]);
}

#[test]
fn one_thread_may_fill_a_core() {
    assert_eq!(plan(dynamic(), &snapshot(2, &[(0, 100)])).migrations, []);
    assert_eq!(plan(dynamic(), &snapshot(2, &[(0, 90), (0, 0)])).migrations, []);
}

#[test]
fn what_takes_two_steps_is_found() {
    // The thread of 40 that must leave fits nowhere until another one makes room.
    let mut loads = snapshot(3, &[(0, 50), (0, 40), (1, 30), (1, 20), (2, 55)]);
    for thread in [0, 4] {
        loads.threads[thread].mask = Some(cores(if thread == 0 { "0" } else { "2" }));
    }
    let mut found = plan(dynamic(), &loads);
    for order in &found.migrations {
        let id = usize::try_from(order.thread).unwrap();
        loads.threads[id].home = order.to;
    }
    let load = |core| loads.threads.iter().filter(move |it| it.home == core).map(|it| it.busy);
    let sums: Vec<u64> = (0..3).map(|core| load(core).sum()).collect();
    assert!(sums.iter().all(|sum| *sum <= 80), "{sums:?} after {:?}", found.migrations);
    found.migrations.retain(|order| order.reason != MigrationReason::Overload);
    assert_eq!(found.migrations, []);
}

#[test]
fn where_all_is_full_the_fullest_gives_to_the_emptiest_if_that_helps() {
    let loads = snapshot(2, &[(0, 40), (0, 40), (0, 20), (1, 45), (1, 20)]);
    assert_eq!(plan(dynamic(), &loads).migrations, [order(2, 0, 1, MigrationReason::Overload)]);
    let level = snapshot(2, &[(0, 50), (0, 50), (1, 50), (1, 45)]);
    assert_eq!(plan(dynamic(), &level).migrations, []);
}

#[test]
fn what_a_full_reactor_sets_free_is_not_given_away_before_it_is_seen() {
    // Core 0 was saturated: when 50 leave, the other 50 may well be 80.
    let mut loads = snapshot(3, &[(0, 50), (0, 50), (1, 24)]);
    for thread in 0..2 {
        loads.threads[thread].mask = Some(cores("0,2"));
    }
    loads.threads[2].mask = Some(cores("0-1"));
    assert_eq!(plan(dynamic(), &loads).migrations, [order(0, 0, 2, MigrationReason::Overload)]);
}

#[test]
fn a_load_that_was_seen_is_not_forgotten_on_a_full_reactor() {
    let mut scheduler = scheduler(dynamic(), 3);
    let apart = snapshot(3, &[(0, 60), (1, 70), (2, 60)]);
    assert_eq!(scheduler.plan(at(0), &apart).migrations, []);
    // An external migration puts the first two together; each gets half of the core and wants more.
    let together = snapshot(3, &[(1, 50), (1, 50), (2, 30)]);
    let migrations = scheduler.plan(at(9), &together).migrations;
    assert_eq!(
        migrations,
        [order(0, 1, 0, MigrationReason::Overload)],
        "it would not fit in beside 30"
    );
}

#[test]
fn a_reactor_whose_threads_fit_elsewhere_is_emptied() {
    let found = plan(dynamic(), &snapshot(3, &[(0, 30), (1, 25), (2, 60)]));
    assert_eq!(found.migrations, [order(1, 1, 0, MigrationReason::Vacate)]);
    assert_eq!(found.empty, cores("1"));
    let found = plan(dynamic(), &snapshot(3, &[(0, 50), (1, 26), (2, 76)]));
    assert_eq!(found.migrations, [], "76 would be less than 5 below the limit");
}

#[test]
fn a_thread_that_fills_a_core_is_not_migrated_to_the_idle_core() {
    let found = plan(dynamic(), &snapshot(2, &[(1, 70)]));
    assert_eq!(found.migrations, [order(0, 1, 0, MigrationReason::Vacate)]);
    assert_eq!(plan(dynamic(), &snapshot(2, &[(1, 90)])).migrations, []);
}

#[test]
fn a_reactor_is_not_emptied_by_half() {
    let found = plan(dynamic(), &snapshot(2, &[(0, 40), (1, 30), (1, 40)]));
    assert_eq!(found.migrations, []);
}

#[test]
fn nothing_moves_twice_within_the_rest() {
    let options = Options { migration_interval: Span::from_secs(5), ..dynamic() };
    let mut scheduler = scheduler(options, 2);
    let idle = snapshot(2, &[(0, 10), (1, 5)]);
    assert_eq!(scheduler.plan(at(10), &idle).migrations, [order(1, 1, 0, MigrationReason::Idle)]);
    // The migration was not carried out, or was undone.
    assert_eq!(scheduler.plan(at(11), &idle).migrations, []);
    assert_eq!(scheduler.plan(at(14), &idle).migrations, []);
    assert_eq!(scheduler.plan(at(15), &idle).migrations.len(), 1);

    let mut arrived = idle;
    arrived.threads[1].last_migration = Some(at(18));
    assert_eq!(scheduler.plan(at(22), &arrived).migrations, [], "rests from its arrival on");
    assert_eq!(scheduler.plan(at(23), &arrived).migrations.len(), 1);
}

#[test]
fn a_thread_on_its_way_gets_no_second_order() {
    let mut loads = snapshot(2, &[(0, 10), (1, 5)]);
    loads.threads[1].moving = true;
    assert_eq!(plan(dynamic(), &loads).migrations, []);
}

#[test]
fn a_load_that_trembles_around_a_limit_moves_nothing_to_and_fro() {
    let mut scheduler = scheduler(dynamic(), 2);
    let mut homes = [0, 0, 1];
    let mut migrations = 0;
    for second in 0..600 {
        let tremble = second % 4;
        let loads = [40 + tremble, 37, 18 + tremble];
        let threads: Vec<(u32, u64)> = homes.into_iter().zip(loads).collect();
        for order in scheduler.plan(at(second), &snapshot(2, &threads)).migrations {
            homes[usize::try_from(order.thread).unwrap()] = order.to;
            migrations += 1;
        }
    }
    assert!(migrations <= 2, "{migrations} moves in 600 periods");
}

#[test]
fn the_static_policy_moves_nothing_and_can_be_switched_to_and_fro() {
    let loads = snapshot(3, &[(0, 60), (0, 60), (1, 0), (2, 0)]);
    let mut scheduler = scheduler(Options::default(), 3);
    let found = scheduler.plan(at(0), &loads);
    assert_eq!((found.migrations.len(), found.empty.len()), (0, 0));
    for second in [10, 20, 30] {
        scheduler.set_options(dynamic()).unwrap();
        assert!(!scheduler.plan(at(second), &loads).migrations.is_empty());
        scheduler.set_options(Options::default()).unwrap();
        assert_eq!(scheduler.plan(at(second + 9), &loads).migrations, []);
    }
}

#[test]
fn refused_settings_change_nothing() {
    let mut scheduler = scheduler(dynamic(), 2);
    let wrong = Options { policy: Policy::Static, scheduling_core: Some(7), ..dynamic() };
    assert!(scheduler.set_options(wrong).is_err());
    assert_eq!(scheduler.options(), &dynamic());
}
