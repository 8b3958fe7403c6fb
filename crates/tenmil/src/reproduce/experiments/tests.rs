use std::collections::BTreeSet;

use tenmil_bench::{Effort, Experiment, Variant};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_linux::{Clock, CpuList};

use super::{SOURCES, all, choose};
use crate::reproduce::BenchWork;
use crate::reproduce::work::words_of;

#[test]
fn names_are_words_and_no_two_are_alike() {
    let names: BTreeSet<&str> = all().iter().map(|experiment| experiment.name).collect();
    assert_eq!(names.len(), all().len());
    for name in names {
        assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
    }
}

#[test]
fn every_question_is_about_sides_and_figures_that_there_are() {
    for Experiment { name, sides, questions, figures, seeds, claim, .. } in all() {
        let labels: BTreeSet<&str> = sides.iter().map(|side| side.label).collect();
        assert_eq!(labels.len(), sides.len(), "{name} has two sides of one name");
        assert!(!questions.is_empty() && !figures.is_empty(), "{name}");
        for question in &questions {
            for side in question.compared.sides() {
                assert!(labels.contains(side), "{name} asks about `{side}`");
            }
            let figure = question.compared.figure();
            assert!(figures.iter().any(|known| known.key == figure), "{name} asks for {figure}");
        }
        assert!(!seeds.is_empty() && seeds.iter().all(|seed| usize::from(*seed) <= SOURCES.len()));
        assert!(claim.ends_with('.') && !claim.contains("  "), "{name}: {claim}");
    }
}

#[test]
fn the_claim_itself_is_asked_in_a_quick_run_too() {
    for experiment in all() {
        let left_out = |label: &str| {
            let is_it = |side: &&Variant<BenchWork>| side.label == label;
            !Effort::QUICK.takes(experiment.sides.iter().find(is_it).unwrap())
        };
        let mut sides = experiment.questions[0].compared.sides();
        assert!(!sides.any(left_out), "{}", experiment.name);
    }
}

/// Arguments of every variant that runs `tenmil perf`.
fn loads() -> Vec<(&'static str, &'static str)> {
    let of = |work: &BenchWork| match *work {
        BenchWork::Perf(words)
        | BenchWork::Served { perf: words, .. }
        | BenchWork::OverVeth { perf: words, .. }
        | BenchWork::Built { perf: words, .. } => vec![words],
        BenchWork::Phases(phases) => phases.to_vec(),
        BenchWork::Mixed { .. } | BenchWork::Loop { .. } | BenchWork::Fio(_) => Vec::new(),
    };
    let sides = |experiment: Experiment<BenchWork>| {
        let words = experiment.sides.iter().flat_map(|side| of(&side.work)).collect::<Vec<_>>();
        words.into_iter().map(move |words| (experiment.name, words))
    };
    all().into_iter().flat_map(sides).collect()
}

#[test]
fn every_load_is_one_that_perf_understands() {
    let cores = CpuList::parse("0-1").unwrap();
    assert!(loads().len() > 30);
    for (name, words) in loads() {
        let target = "tcp://127.0.0.1:4420/nqn.2026-01.org.tenmil:disk";
        let words = words_of(words, &cores, target).unwrap();
        let parsed = crate::cli::perf_options(&words);
        assert!(parsed.is_ok(), "{name}: {words:?}: {parsed:?}");
        assert!(!words.iter().any(|word| word.contains(['{', '}'])), "{name}: {words:?}");
    }
}

/// Options of a device are checked when it is opened; those of `emu:` when it is parsed.
#[test]
fn every_device_of_a_load_opens() {
    let (cores, regions) = (CpuList::parse("0-1").unwrap(), RegionTable::new(1024));
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, more: crate::KINDS };
    let mut opened = BTreeSet::new();
    for (name, words) in loads() {
        let words = words_of(words, &cores, "tcp://127.0.0.1:4420/nqn").unwrap();
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
fn each_pace_ends_within_its_limit_with_every_spare_round() {
    for pace in [Effort::QUICK, Effort::FULL] {
        let planned: u64 = all().iter().map(|experiment| pace.planned(experiment).ns).sum();
        let share = planned * 100 / pace.limit.ns;
        assert!((30..=95).contains(&share), "{} takes {share} % of its time", pace.name);
    }
}

#[test]
fn a_name_that_is_none_is_refused_with_all_that_are() {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let chosen = choose(&names(&["polling", "ten-million"])).unwrap();
    let chosen: Vec<&str> = chosen.iter().map(|experiment| experiment.name).collect();
    assert_eq!(chosen, ["ten-million", "polling"], "in the order of the page");
    let refused = choose(&names(&["polling", "twelve-million"])).unwrap_err();
    assert_eq!(refused.category.exit_code(), 2);
    assert!(refused.text.starts_with("--only twelve-million: no experiment has that name"));
    for experiment in all() {
        assert!(refused.text.contains(experiment.name), "{}", refused.text);
    }
    assert_eq!(choose(&[]).unwrap().len(), all().len());
}
