//! Experiments on build variants, run only where `cargo xtask pgo` has built them.

use crate::experiment::{Experiment, Threshold, Variant};

use super::{IOPS, PER_IO, ratio_criterion};
use crate::reproduce::BenchTask;

const WORDS: &str = "emu:null?count=21";
const LIMITS: &str = "Whole programs, built with the same compiler and run one after the other. The \
    emulated SSD is built the same way and runs on the other core.";

pub(super) fn build_experiments() -> Vec<Experiment<BenchTask>> {
    vec![link_time_optimization_experiment(), profile_guided_optimization_experiment()]
}

fn build_variant(label: &'static str, variant: &'static str) -> Variant<BenchTask> {
    Variant::new(label, BenchTask::Built { variant, perf: WORDS })
}

fn link_time_optimization_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "link-time-optimization",
        claim: "Optimising when the program is linked, over all its parts, is worth 5 to 10 %.",
        seeds: &[1, 2],
        seen: "5 to 10 % by the talk; little for the driver by the article",
        figures: &[IOPS, PER_IO],
        sides: vec![build_variant("with", "lto"), build_variant("without", "no-lto")],
        questions: vec![ratio_criterion(
            "with against without",
            "with",
            "without",
            IOPS,
            Threshold::AtLeast(1.05),
        )],
        limits: LIMITS,
    }
}

fn profile_guided_optimization_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "profile-guided",
        claim: "Optimising by a profile of such runs makes it faster still.",
        seeds: &[1],
        seen: "no figure: their results go without",
        figures: &[IOPS, PER_IO],
        sides: vec![build_variant("by a profile", "pgo"), build_variant("without", "lto")],
        questions: vec![ratio_criterion(
            "by a profile against without",
            "by a profile",
            "without",
            IOPS,
            Threshold::AtLeast(1.02),
        )],
        limits: LIMITS,
    }
}
