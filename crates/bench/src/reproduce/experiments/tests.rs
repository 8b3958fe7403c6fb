use std::collections::BTreeSet;

use crate::experiment::{Effort, Experiment, Variant};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_linux::{Clock, CpuList};

use super::{SOURCES, all_experiments, experiments_by_name, perf_arguments_of_variants};
use crate::reproduce::BenchTask;
use crate::reproduce::bench_task::expand_placeholders;

#[test]
fn experiment_names_are_unique_words() {
    let names: BTreeSet<&str> =
        all_experiments().iter().map(|experiment| experiment.name).collect();
    assert_eq!(names.len(), all_experiments().len());
    for name in names {
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
    }
}

#[test]
fn every_criterion_refers_to_existing_variants_and_metrics() {
    for Experiment { name, sides, questions, figures, seeds, claim, .. } in all_experiments() {
        let labels: BTreeSet<&str> = sides.iter().map(|side| side.label).collect();
        assert_eq!(labels.len(), sides.len(), "{name} has two sides of one name");
        assert!(!questions.is_empty() && !figures.is_empty(), "{name}");
        for question in &questions {
            for side in question.compared.variants() {
                assert!(labels.contains(side), "{name} asks about `{side}`");
            }
            let figure = question.compared.metric_key();
            assert!(figures.iter().any(|known| known.key == figure), "{name} asks for {figure}");
        }
        assert!(!seeds.is_empty() && seeds.iter().all(|seed| usize::from(*seed) <= SOURCES.len()));
        assert!(claim.ends_with('.') && !claim.contains("  "), "{name}: {claim}");
    }
}

#[test]
fn claim_is_tested_in_a_quick_run_too() {
    for experiment in all_experiments() {
        let left_out = |label: &str| {
            let is_it = |side: &&Variant<BenchTask>| side.label == label;
            !Effort::QUICK.includes_variant(experiment.sides.iter().find(is_it).unwrap())
        };
        let mut sides = experiment.questions[0].compared.variants();
        assert!(!sides.any(left_out), "{}", experiment.name);
    }
}

/// Options of a device are checked when it is opened; those of `emu:` when it is parsed.
#[test]
fn every_device_uri_of_a_load_opens() {
    let (cores, regions) = (CpuList::parse("0-1").unwrap(), RegionTable::new(1024));
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds: tenmil::KINDS };
    let mut opened = BTreeSet::new();
    for (name, words) in perf_arguments_of_variants() {
        let words = expand_placeholders(words, &cores, "tcp://127.0.0.1:4420/nqn").unwrap();
        let is_here =
            |word: &&String| ["model:", "null:", "ram:"].iter().any(|kind| word.starts_with(kind));
        for word in words.iter().filter(is_here) {
            let uri: Uri = word.parse().unwrap();
            let device = opener.open(&uri);
            assert!(device.is_ok(), "{name}: {word}: {}", device.err().unwrap());
            opened.insert(word.clone());
        }
    }
    assert!(opened.len() >= 3, "{opened:?}");
}

#[test]
fn each_effort_ends_within_its_limit_with_every_extra_round() {
    for effort in [Effort::QUICK, Effort::FULL] {
        let planned: u64 =
            all_experiments().iter().map(|experiment| effort.duration_max(experiment).ns).sum();
        let share = planned * 100 / effort.limit.ns;
        assert!((30..=95).contains(&share), "{} takes {share} % of its time", effort.name);
    }
}

#[test]
fn unknown_experiment_name_is_rejected_with_all_known_ones() {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let chosen = experiments_by_name(&names(&["polling", "ten-million"])).unwrap();
    let chosen: Vec<&str> = chosen.iter().map(|experiment| experiment.name).collect();
    assert_eq!(chosen, ["ten-million", "polling"], "in the order of the page");
    let refused = experiments_by_name(&names(&["polling", "twelve-million"])).unwrap_err();
    assert_eq!(refused.category.exit_code(), 2);
    assert!(refused.text.starts_with("--only twelve-million: no experiment has that name"));
    for experiment in all_experiments() {
        assert!(refused.text.contains(experiment.name), "{}", refused.text);
    }
    assert_eq!(experiments_by_name(&[]).unwrap().len(), all_experiments().len());
}
