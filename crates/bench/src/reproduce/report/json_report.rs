//! JSON report with all measured data and results.

use crate::experiment::Variant;
use serde_json::{Value, json};
use tenmil_linux::CpuList;

use super::VERDICTS;
use crate::perf::report::machine_rows;
use crate::reproduce::{BenchTask, ExperimentResult, ReproduceRun};

/// Renders the report as JSON.
pub fn render_json(evidence: &ReproduceRun) -> String {
    let counts = VERDICTS.map(|verdict| {
        (verdict.text().replace(' ', "_"), evidence.claim_count_with_verdict(verdict))
    });
    let machine = machine_rows(&evidence.machine);
    let report = json!({
        "command": evidence.command,
        "version": env!("CARGO_PKG_VERSION"),
        "effort": evidence.effort.name,
        "rounds": evidence.effort.rounds,
        "trial_s": evidence.effort.trial_time.as_secs_f64(),
        "verdicts": counts.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "warnings": evidence.warnings(),
        "environment": machine.into_iter().collect::<std::collections::BTreeMap<_, _>>(),
        "experiments": evidence.experiment_results.iter().map(|it| experiment_result_json(evidence, it)).collect::<Vec<_>>(),
    });
    format!("{report:#}\n")
}

/// Lists the experiments as JSON.
pub fn experiment_list_json(chosen: &[crate::experiment::Experiment<BenchTask>]) -> String {
    let rows: Vec<Value> = chosen
        .iter()
        .map(|it| json!({ "name": it.name, "claim": it.claim, "seeds": it.seeds }))
        .collect();
    format!("{:#}\n", Value::from(rows))
}

fn experiment_result_json(evidence: &ReproduceRun, experiment_result: &ExperimentResult) -> Value {
    let experiment = &experiment_result.experiment;
    let questions =
        experiment_result.criterion_rows().into_iter().zip(&experiment_result.findings).map(
            |(row, finding)| {
                json!({
                    "question": row.question,
                    "criterion": row.criterion,
                    "verdict": finding.verdict,
                    "values": finding.values,
                    "disturbed_rounds": finding.disturbed,
                    "lost": finding.lost,
                    "reason": finding.reason,
                })
            },
        );
    let seconds = evidence.effort.trial_time.as_secs_f64();
    let side = |side: &Variant<BenchTask>| {
        json!({
            "label": side.label,
            "commands": side.work.command_lines(&CpuList::allowed_cpus(), seconds),
            "missing": experiment_result.record.missing.get(side.label),
        })
    };
    json!({
        "name": experiment.name,
        "claim": experiment.claim,
        "seeds": experiment.seeds,
        "published": experiment.seen,
        "verdict": experiment_result.claim_verdict(),
        "questions": questions.collect::<Vec<_>>(),
        "sides": experiment.sides.iter().map(side).collect::<Vec<_>>(),
        "rounds": experiment_result.record.rounds,
        "limitations": experiment.limits,
        "reused": experiment_result.is_reused,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{experiment_list_json, render_json};
    use crate::reproduce::experiments::all_experiments;
    use crate::reproduce::report::sample_run::sample_run;

    #[test]
    fn all_measured_data_has_its_verdict() {
        let report: Value = serde_json::from_str(&render_json(&sample_run())).unwrap();
        assert_eq!(report["verdicts"]["holds"], 1);
        assert_eq!(report["verdicts"]["not_shown_here"], 1);
        assert_eq!(report["effort"], "quick");
        let experiments = report["experiments"].as_array().unwrap();
        let layout = &experiments[0];
        assert_eq!(
            (&layout["name"], &layout["verdict"]),
            (&"slot-layout".into(), &"confirmed".into())
        );
        assert_eq!(layout["questions"][0]["values"]["median"], 2.0);
        assert_eq!(layout["rounds"][2]["trials"]["dense"]["figures"]["rate"], 2e6);
        assert_eq!(experiments[1]["verdict"], "refuted");
        assert_eq!(experiments[2]["questions"][0]["values"], Value::Null);
        assert_eq!(experiments[3]["sides"][0]["missing"], "no <card> here");
        let typed = experiments[1]["sides"][1]["commands"][0].as_str().unwrap();
        assert_eq!(typed, "tenmil perf 'emu:null?count=21' --block mq -t 0.2");
    }

    #[test]
    fn experiment_list_is_valid_json() {
        let rows: Value = serde_json::from_str(&experiment_list_json(&all_experiments())).unwrap();
        assert_eq!(rows.as_array().unwrap().len(), all_experiments().len());
        assert_eq!(rows[0]["name"], "ten-million");
    }
}
