//! A loop on its own thread.

use std::collections::BTreeMap;

use crate::experiment::Effort;
use tenmil_base::Span;
use tenmil_linux::{Clock, NamedThread};

use crate::reproduce::bench_task::BenchLoopFn;

/// Runs a loop on `core` and returns its rate and the time per operation.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(super) fn measure_loop_on_core(
    work: BenchLoopFn,
    clock: Clock,
    core: Option<u32>,
    effort: &Effort,
) -> Result<BTreeMap<String, f64>, String> {
    let time = effort.trial_time;
    let spin = move |_: &tenmil_linux::StopFlag| measure_loop(work, clock, time);
    let thread =
        NamedThread::spawn("loop", core, spin).map_err(|error| format!("a loop: {error}"))?;
    let (count, elapsed) = thread.join();
    if count == 0 || elapsed.ns == 0 {
        return Err(format!("a loop: {count} in {} ns, expected some", elapsed.ns));
    }
    let each = elapsed.ns as f64 / count as f64;
    Ok(BTreeMap::from([("rate".to_owned(), 1e9 / each), ("ns".to_owned(), each)]))
}

/// Measures from the first call of the condition, which excludes the setup of the loop.
fn measure_loop(work: BenchLoopFn, clock: Clock, time: Span) -> (u64, Span) {
    let (mut begun, mut last) = (None, clock.now());
    let count = work(&mut || {
        last = clock.now();
        last.since(*begun.get_or_insert(last)) < time
    });
    (count, last.since(begun.unwrap_or(last)))
}

#[cfg(test)]
mod tests {
    use crate::experiment::Effort;
    use tenmil_base::Span;
    use tenmil_linux::Clock;

    use super::measure_loop_on_core;

    #[test]
    fn loop_ends_in_time_and_reports_its_rate() {
        let effort = Effort { trial_time: Span::from_ms(20), ..Effort::QUICK };
        let counting = |continues: &mut dyn FnMut() -> bool| {
            let mut count = 0;
            while continues() {
                count += 1;
            }
            count
        };
        let figures = measure_loop_on_core(counting, Clock::start(), None, &effort).unwrap();
        let (rate, ns) = (figures["rate"], figures["ns"]);
        assert!(rate > 1000.0 && (rate * ns / 1e9 - 1.0).abs() < 1e-9, "{rate} and {ns}");
        let idle = measure_loop_on_core(|_| 0, Clock::start(), None, &effort).unwrap_err();
        assert!(idle.contains("expected some"), "{idle}");
    }
}
