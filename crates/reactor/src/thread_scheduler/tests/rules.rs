//! Idle threads are collected, overloaded reactors relieved, and rest times obeyed.

use tenmil_base::Span;

use super::{
    MigrationReason, Options, Policy, core_list, dynamic_options, migration_of, new_scheduler,
    plan_with_new_scheduler, seconds, snapshot,
};

#[test]
fn idle_threads_are_consolidated_on_the_scheduling_core() {
    let loads = snapshot(4, &[(0, 10), (1, 0), (2, 19), (3, 70)]);
    let found = plan_with_new_scheduler(dynamic_options(), &loads);
    let consolidated = [
        migration_of(1, 1, 0, MigrationReason::Idle),
        migration_of(2, 2, 0, MigrationReason::Idle),
    ];
    assert_eq!(found.migrations, consolidated);
    assert_eq!(found.empty, core_list("1-2"));

    let elsewhere =
        plan_with_new_scheduler(Options { scheduling_core: Some(2), ..dynamic_options() }, &loads);
    assert!(elsewhere.migrations.iter().all(|order| order.to == 2), "{elsewhere:?}");
    assert_eq!(elsewhere.empty, core_list("0-1"));
}

#[test]
fn idle_threads_are_not_consolidated_beyond_the_limit() {
    let threads: Vec<(u32, u64)> = (0..8).map(|core| (core, 19)).collect();
    let found = plan_with_new_scheduler(dynamic_options(), &snapshot(8, &threads));
    let consolidated = found.migrations.iter().filter(|order| order.to == 0).count();
    assert_eq!(
        consolidated, 2,
        "3 times 19 is 57, a fourth would leave less than 5 below 80: {found:?}"
    );
}

#[test]
fn idle_thread_is_consolidated_on_a_full_core_too() {
    let found = plan_with_new_scheduler(dynamic_options(), &snapshot(2, &[(0, 100), (1, 0)]));
    assert_eq!(found.migrations, [migration_of(1, 1, 0, MigrationReason::Idle)]);
}

#[test]
fn overloaded_reactor_sheds_the_smallest_sufficient_thread() {
    let loads = snapshot(2, &[(0, 22), (0, 30), (0, 40), (1, 31)]);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &loads).migrations,
        [migration_of(0, 0, 1, MigrationReason::Overload)]
    );
    let loads = snapshot(2, &[(0, 5), (0, 40), (0, 45), (1, 31)]);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &loads).migrations,
        [migration_of(1, 0, 1, MigrationReason::Overload)]
    );
}

#[test]
fn single_thread_may_fill_a_core() {
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &snapshot(2, &[(0, 100)])).migrations,
        []
    );
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &snapshot(2, &[(0, 90), (0, 0)])).migrations,
        []
    );
}

#[test]
fn two_step_relocation_is_found() {
    // The thread of 40 that must leave fits nowhere until another one makes room.
    let mut loads = snapshot(3, &[(0, 50), (0, 40), (1, 30), (1, 20), (2, 55)]);
    for thread in [0, 4] {
        loads.threads[thread].mask = Some(core_list(if thread == 0 { "0" } else { "2" }));
    }
    let mut found = plan_with_new_scheduler(dynamic_options(), &loads);
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
fn most_loaded_reactor_moves_to_the_least_loaded_if_that_helps() {
    let loads = snapshot(2, &[(0, 40), (0, 40), (0, 20), (1, 45), (1, 20)]);
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &loads).migrations,
        [migration_of(2, 0, 1, MigrationReason::Overload)]
    );
    let level = snapshot(2, &[(0, 50), (0, 50), (1, 50), (1, 45)]);
    assert_eq!(plan_with_new_scheduler(dynamic_options(), &level).migrations, []);
}

#[test]
fn capacity_freed_on_a_full_reactor_is_used_only_after_it_is_measured() {
    // Core 0 was saturated: when 50 leave, the other 50 may well be 80.
    let mut loads = snapshot(3, &[(0, 50), (0, 50), (1, 24)]);
    for thread in 0..2 {
        loads.threads[thread].mask = Some(core_list("0,2"));
    }
    loads.threads[2].mask = Some(core_list("0-1"));
    assert_eq!(
        plan_with_new_scheduler(dynamic_options(), &loads).migrations,
        [migration_of(0, 0, 2, MigrationReason::Overload)]
    );
}

#[test]
fn measured_load_is_remembered_on_a_full_reactor() {
    let mut scheduler = new_scheduler(dynamic_options(), 3);
    let apart = snapshot(3, &[(0, 60), (1, 70), (2, 60)]);
    assert_eq!(scheduler.plan(seconds(0), &apart).migrations, []);
    // An external migration puts the first two together; each gets half of the core and wants more.
    let together = snapshot(3, &[(1, 50), (1, 50), (2, 30)]);
    let migrations = scheduler.plan(seconds(9), &together).migrations;
    assert_eq!(
        migrations,
        [migration_of(0, 1, 0, MigrationReason::Overload)],
        "it would not fit in beside 30"
    );
}

#[test]
fn reactor_is_vacated_if_all_its_threads_fit_elsewhere() {
    let found =
        plan_with_new_scheduler(dynamic_options(), &snapshot(3, &[(0, 30), (1, 25), (2, 60)]));
    assert_eq!(found.migrations, [migration_of(1, 1, 0, MigrationReason::Vacate)]);
    assert_eq!(found.empty, core_list("1"));
    let found =
        plan_with_new_scheduler(dynamic_options(), &snapshot(3, &[(0, 50), (1, 26), (2, 76)]));
    assert_eq!(found.migrations, [], "76 would be less than 5 below the limit");
}

#[test]
fn thread_that_fills_a_core_does_not_migrate_to_the_scheduling_core() {
    let found = plan_with_new_scheduler(dynamic_options(), &snapshot(2, &[(1, 70)]));
    assert_eq!(found.migrations, [migration_of(0, 1, 0, MigrationReason::Vacate)]);
    assert_eq!(plan_with_new_scheduler(dynamic_options(), &snapshot(2, &[(1, 90)])).migrations, []);
}

#[test]
fn reactor_is_vacated_completely_or_not_at_all() {
    let found =
        plan_with_new_scheduler(dynamic_options(), &snapshot(2, &[(0, 40), (1, 30), (1, 40)]));
    assert_eq!(found.migrations, []);
}

#[test]
fn thread_migrates_at_most_once_per_hold_time() {
    let options = Options { migration_interval: Span::from_secs(5), ..dynamic_options() };
    let mut scheduler = new_scheduler(options, 2);
    let idle = snapshot(2, &[(0, 10), (1, 5)]);
    assert_eq!(
        scheduler.plan(seconds(10), &idle).migrations,
        [migration_of(1, 1, 0, MigrationReason::Idle)]
    );
    // The migration was not carried out, or was undone.
    assert_eq!(scheduler.plan(seconds(11), &idle).migrations, []);
    assert_eq!(scheduler.plan(seconds(14), &idle).migrations, []);
    assert_eq!(scheduler.plan(seconds(15), &idle).migrations.len(), 1);

    let mut arrived = idle;
    arrived.threads[1].last_migration = Some(seconds(18));
    assert_eq!(scheduler.plan(seconds(22), &arrived).migrations, [], "rests from its arrival on");
    assert_eq!(scheduler.plan(seconds(23), &arrived).migrations.len(), 1);
}

#[test]
fn migrating_thread_gets_no_second_request() {
    let mut loads = snapshot(2, &[(0, 10), (1, 5)]);
    loads.threads[1].moving = true;
    assert_eq!(plan_with_new_scheduler(dynamic_options(), &loads).migrations, []);
}

#[test]
fn load_oscillating_around_a_limit_causes_no_migrations() {
    let mut scheduler = new_scheduler(dynamic_options(), 2);
    let mut homes = [0, 0, 1];
    let mut migrations = 0;
    for second in 0..600 {
        let tremble = second % 4;
        let loads = [40 + tremble, 37, 18 + tremble];
        let threads: Vec<(u32, u64)> = homes.into_iter().zip(loads).collect();
        for order in scheduler.plan(seconds(second), &snapshot(2, &threads)).migrations {
            homes[usize::try_from(order.thread).unwrap()] = order.to;
            migrations += 1;
        }
    }
    assert!(migrations <= 2, "{migrations} moves in 600 periods");
}

#[test]
fn static_policy_migrates_nothing_and_can_be_switched() {
    let loads = snapshot(3, &[(0, 60), (0, 60), (1, 0), (2, 0)]);
    let mut scheduler = new_scheduler(Options::default(), 3);
    let found = scheduler.plan(seconds(0), &loads);
    assert_eq!((found.migrations.len(), found.empty.len()), (0, 0));
    for second in [10, 20, 30] {
        scheduler.set_options(dynamic_options()).unwrap();
        assert!(!scheduler.plan(seconds(second), &loads).migrations.is_empty());
        scheduler.set_options(Options::default()).unwrap();
        assert_eq!(scheduler.plan(seconds(second + 9), &loads).migrations, []);
    }
}

#[test]
fn rejected_options_change_nothing() {
    let mut scheduler = new_scheduler(dynamic_options(), 2);
    let wrong = Options { policy: Policy::Static, scheduling_core: Some(7), ..dynamic_options() };
    assert!(scheduler.set_options(wrong).is_err());
    assert_eq!(scheduler.options(), &dynamic_options());
}
