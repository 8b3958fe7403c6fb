//! Sample run for tests of the reports, with one claim of each verdict.

use crate::experiment::{Effort, ExperimentRecord, Round, TrialResult};

use crate::perf::report::sample_result::quiet_machine;
use crate::reproduce::{ExperimentResult, ReproduceRun, experiments_by_name};

/// Round in which every variant does a given multiple of a base value.
fn sample_round(name: &str, shares: &[(&str, f64)], others: f64) -> Round {
    let experiment = experiments_by_name(&[name.to_owned()]).unwrap().remove(0);
    let reading = |share: f64| TrialResult {
        figures: experiment.figures.iter().map(|it| (it.key.to_owned(), 1e6 * share)).collect(),
        steal: 0.0,
        others,
        processors: 2,
    };
    let turns = shares.iter().map(|(label, share)| ((*label).to_owned(), reading(*share)));
    Round { trials: turns.collect() }
}

fn sample_experiment_result(
    name: &str,
    rounds: Vec<Round>,
    missing: &[(&str, &str)],
    is_reused: bool,
) -> ExperimentResult {
    let missing = missing.iter().map(|(side, why)| ((*side).to_owned(), (*why).to_owned()));
    let record = ExperimentRecord { name: name.into(), rounds, missing: missing.collect() };
    ExperimentResult::new(
        experiments_by_name(&[name.to_owned()]).unwrap().remove(0),
        record,
        is_reused,
    )
}

/// Sample run: one claim confirmed, one refuted, one inconclusive and one not measured.
pub(crate) fn sample_run() -> ReproduceRun {
    let layouts = [("dense", 2.0), ("a page apart", 1.0)];
    let layer = [("driver alone", 1.0), ("block layer", 0.5)];
    let draws = [("multiplication", 1.2), ("division", 1.0)];
    let experiment_results = vec![
        sample_experiment_result(
            "slot-layout",
            vec![sample_round("slot-layout", &layouts, 0.0); 3],
            &[],
            false,
        ),
        sample_experiment_result(
            "block-layer",
            vec![sample_round("block-layer", &layer, 0.0); 3],
            &[],
            true,
        ),
        sample_experiment_result(
            "random-block",
            vec![sample_round("random-block", &draws, 0.6); 3],
            &[],
            false,
        ),
        sample_experiment_result(
            "tcp-busy-poll",
            Vec::new(),
            &[("busy polling", "no <card> here")],
            false,
        ),
    ];
    ReproduceRun {
        effort: Effort::QUICK,
        machine: quiet_machine().machine,
        experiment_results,
        command: "tenmil reproduce --quick --out '<b>'".into(),
    }
}
