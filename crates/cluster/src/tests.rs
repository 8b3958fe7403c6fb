//! Seeds must be repeatable, must show no violation, and must find injected bugs.

use super::{ClusterPlan, InjectedBugs, run_plan};

#[test]
fn same_seed_gives_the_same_run() {
    for seed in [3, 4, 126] {
        let plan = ClusterPlan::from_seed(seed, InjectedBugs::default());
        let first = run_plan(&plan);
        assert!(first.events > 20, "{first:?}");
        assert_eq!(first, run_plan(&plan));
    }
}

/// The claim of the new owner is durable, and the flush that would have said so fails.
#[test]
fn failed_takeover_claim_is_retried() {
    for seed in [468, 794] {
        let status = run_plan(&ClusterPlan::from_seed(seed, InjectedBugs::default()));
        assert_eq!(status.failure, None, "seed {seed}");
    }
}

#[test]
fn injected_bugs_are_found_by_known_seeds() {
    let seeds = [0, 0, 39, 83, 11, 24, 1, 7, 18, 163];
    assert_eq!(InjectedBugs::all_with_names().len(), seeds.len());
    for ((name, bugs), seed) in InjectedBugs::all_with_names().into_iter().zip(seeds) {
        assert!(
            run_plan(&ClusterPlan::from_seed(seed, bugs)).failure.is_some(),
            "{name}: seed {seed}"
        );
    }
}

#[test]
#[ignore = "tries many seeds: `cargo xtask sim --cluster --injected-bugs` does that"]
fn each_injected_bug_is_found() {
    for (name, bugs) in InjectedBugs::all_with_names() {
        let found = bugs.first_seed(200);
        println!("bug {name}: {:?}", found.map(|found| (found.seed, found.failure)));
    }
}

/// For manual runs: `SEEDS=0..100`, and `BUG` is the number of an injected bug.
#[test]
#[ignore = "prints what seeds do"]
fn run_seeds_from_environment() {
    let range = std::env::var("SEEDS").unwrap();
    let (first, last) = range.split_once("..").unwrap();
    let bug: Option<usize> = std::env::var("BUG").ok().map(|bug| bug.parse().unwrap());
    let bugs = bug.map_or(InjectedBugs::default(), |bug| InjectedBugs::all_with_names()[bug].1);
    for seed in first.parse::<u64>().unwrap()..last.parse().unwrap() {
        let plan = ClusterPlan::from_seed(seed, bugs);
        let kind = plan.plan_kind();
        if std::env::var("KIND").is_ok_and(|wanted| wanted != kind) {
            continue;
        }
        let status = run_plan(&plan);
        match status.failure {
            Some(failure) => {
                println!("seed {seed} ({kind}): {} events: {failure}", status.events);
                if std::env::var("HISTORY").is_ok() {
                    status.history.iter().for_each(|line| println!("    {line}"));
                }
            }
            None => println!("seed {seed} ({kind}): {} events", status.events),
        }
    }
}

#[test]
#[ignore = "prints all that a seed does"]
fn print_history_from_environment() {
    let seed = std::env::var("SEEDS").unwrap().parse().unwrap();
    let bug: Option<usize> = std::env::var("BUG").ok().map(|bug| bug.parse().unwrap());
    let bugs = bug.map_or(InjectedBugs::default(), |bug| InjectedBugs::all_with_names()[bug].1);
    let plan = ClusterPlan::from_seed(seed, bugs);
    println!("{plan:#?}");
    let warm: u64 = std::env::var("WARM").map_or(0, |warm| warm.parse().unwrap());
    (0..warm).for_each(|_| drop(run_plan(&plan)));
    super::cluster_simulation::run_and_list_history(&plan)
        .iter()
        .for_each(|line| println!("{line}"));
}
