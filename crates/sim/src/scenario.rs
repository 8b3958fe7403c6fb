//! Scripted test run: a world, the steps, and the expected result.

use core::fmt;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use tenmil_nvme_host::ControllerState;

use crate::fault_injector::PlannedFault;
use crate::simulation::{Simulation, WorldOptions};
use crate::test_run::{RunRecord, RunStep, SESSION, TestRun};
use crate::violation::Violation;

/// A scripted test run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Name: `table/fault/moment/…`.
    pub name: String,
    /// Configuration of the world.
    pub options: WorldOptions,
    /// Steps.
    pub steps: Vec<RunStep>,
    /// Expectations, besides the absence of violations.
    pub musts: Vec<ScenarioCheck>,
}

/// An expectation on the result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScenarioCheck {
    /// The first host attaches the controller.
    Attach,
    /// The first host does not attach it, with this text in the error.
    Refuse(&'static str),
    /// The driver reports this event.
    ReportsEvent(&'static str),
    /// The driver does not report this event.
    NoEvent(&'static str),
    /// Every request succeeds, with or without faults.
    Succeed,
    /// Some requests fail with an error status of the device.
    Fail,
    /// Some requests are aborted by the host.
    Abort,
    /// State of the driver when the faults stop.
    EndState(ControllerState),
    /// No queue pair is in use.
    NoQueues,
    /// The IOMMU rejects an access.
    Block,
    /// Faults are injected at least this many times.
    Strike(u64),
    /// A new host is needed.
    Reattach,
    /// No new host is needed.
    Survive,
    /// The harness reports this violation: no driver can defend against the fault.
    Find(&'static str),
}

impl Scenario {
    /// Default session in a default world.
    pub fn default_session(name: impl Into<String>, musts: &[ScenarioCheck]) -> Self {
        Self {
            name: name.into(),
            options: WorldOptions::default(),
            steps: SESSION.to_vec(),
            musts: musts.to_vec(),
        }
    }

    /// Sets the planned faults.
    #[must_use]
    pub fn with_faults(mut self, plan: &[PlannedFault]) -> Self {
        self.options.plan = plan.to_vec();
        self
    }

    /// Sets the steps.
    #[must_use]
    pub fn with_steps(mut self, steps: &[RunStep]) -> Self {
        self.steps = steps.to_vec();
        self
    }

    /// Changes the configuration of the world.
    #[must_use]
    pub fn with_world(mut self, change: impl FnOnce(&mut WorldOptions)) -> Self {
        change(&mut self.options);
        self
    }

    /// Executes the run. A panic of the code under test becomes a violation, if panics unwind.
    pub fn execute(&self) -> RunRecord {
        let ran = catch_unwind(AssertUnwindSafe(|| match Simulation::new(&self.options) {
            Ok(world) => TestRun::new(world).run(&self.steps),
            Err(message) => {
                RunRecord { failure: Some(Violation::Panic { message }), ..RunRecord::default() }
            }
        }));
        let mut record = ran.unwrap_or_else(|cause| {
            let failure = Some(Violation::Panic { message: panic_message(&*cause) });
            RunRecord { failure, ..RunRecord::default() }
        });
        self.apply_expectations(&mut record);
        record
    }

    /// Turns an expectation that was not met into a violation, and removes a violation that was
    /// expected.
    fn apply_expectations(&self, record: &mut RunRecord) {
        let finds = self.musts.iter().find_map(|must| match must {
            ScenarioCheck::Find(words) => Some(*words),
            _ => None,
        });
        if let Some(words) = finds {
            let found = record.failure.take().map_or("nothing".to_owned(), |one| one.to_string());
            if !found.contains(words) {
                let expected = format!("the harness finds `{words}`");
                record.failure = Some(Violation::Expectation { expected, found });
            }
            return;
        }
        if record.failure.is_none()
            && let Some(must) = self.musts.iter().find(|must| !must.is_met(record))
        {
            let found = format!("{}", RunSummary(record));
            record.failure = Some(Violation::Expectation { expected: must.to_string(), found });
        }
    }
}

impl ScenarioCheck {
    fn is_met(&self, record: &RunRecord) -> bool {
        let counts = record.counts;
        let tells = |words: &str| {
            record.driver_events.iter().any(|driver_events| driver_events.contains(words))
        };
        match *self {
            Self::Attach => record.refused.is_none(),
            Self::Refuse(words) => record.refused.as_ref().is_some_and(|why| why.contains(words)),
            Self::ReportsEvent(words) => tells(words),
            Self::NoEvent(words) => !tells(words),
            Self::Succeed => counts.submitted > 0 && counts.succeeded == counts.submitted,
            Self::Fail => counts.failed > 0,
            Self::Abort => counts.aborted > 0,
            Self::EndState(state) => record.state == Some(state),
            Self::NoQueues => record.queues == 0,
            Self::Block => record.blocked > 0,
            Self::Strike(times) => record.faults >= times,
            Self::Reattach => record.reattached,
            Self::Survive => !record.reattached,
            Self::Find(_) => true,
        }
    }
}

impl fmt::Display for ScenarioCheck {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attach => write!(out, "the first host attaches"),
            Self::Refuse(words) => write!(out, "the attach is refused with `{words}`"),
            Self::ReportsEvent(words) => write!(out, "an event `{words}`"),
            Self::NoEvent(words) => write!(out, "no event `{words}`"),
            Self::Succeed => write!(out, "all requests succeed"),
            Self::Fail => write!(out, "some requests fail"),
            Self::Abort => write!(out, "some requests are given up by the host"),
            Self::EndState(state) => write!(out, "the driver is {state:?} when faults end"),
            Self::NoQueues => write!(out, "no queue pair in use"),
            Self::Block => write!(out, "an access is turned away"),
            Self::Strike(times) => write!(out, "the fault strikes {times} times"),
            Self::Reattach => write!(out, "a second host is needed"),
            Self::Survive => write!(out, "no second host is needed"),
            Self::Find(words) => write!(out, "the harness finds `{words}`"),
        }
    }
}

/// One-line summary of a result.
struct RunSummary<'a>(&'a RunRecord);

impl fmt::Display for RunSummary<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RunRecord {
            refused,
            driver_events,
            counts,
            state,
            queues,
            blocked,
            faults,
            reattached,
            ..
        } = self.0;
        write!(
            out,
            "refused {refused:?}, {state:?} with {queues} lanes, {counts:?}, {blocked} blocked, \
             {faults} deeds, reattached {reattached}, reported {driver_events:?}"
        )
    }
}

fn panic_message(cause: &(dyn Any + Send)) -> String {
    let text = cause.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| cause.downcast_ref::<String>().cloned()).unwrap_or_default()
}
