use std::collections::BTreeSet;

use crate::experiment::{Effort, Experiment, Variant};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_linux::{Clock, CpuList};

use super::{SOURCES, all, choose, loads};
use crate::reproduce::BenchTask;
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
            let is_it = |side: &&Variant<BenchTask>| side.label == label;
            !Effort::QUICK.takes(experiment.sides.iter().find(is_it).unwrap())
        };
        let mut sides = experiment.questions[0].compared.sides();
        assert!(!sides.any(left_out), "{}", experiment.name);
    }
}

/// Options of a device are checked when it is opened; those of `emu:` when it is parsed.
#[test]
fn every_device_of_a_load_opens() {
    let (cores, regions) = (CpuList::parse("0-1").unwrap(), RegionTable::new(1024));
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, kinds: tenmil::KINDS };
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
    for effort in [Effort::QUICK, Effort::FULL] {
        let planned: u64 = all().iter().map(|experiment| effort.planned(experiment).ns).sum();
        let share = planned * 100 / effort.limit.ns;
        assert!((30..=95).contains(&share), "{} takes {share} % of its time", effort.name);
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
