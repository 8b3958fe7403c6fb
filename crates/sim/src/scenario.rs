//! One scripted run: a world, a course through it, and what must have shown.

use core::fmt;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use nvme::State;

use crate::course::{Course, Record, SESSION, Step};
use crate::evil::Mischief;
use crate::failure::Failure;
use crate::world::{World, WorldOptions};

/// A scripted run.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// What it is called: `table/fault/moment/…`.
    pub name: String,
    /// The world.
    pub options: WorldOptions,
    /// The course.
    pub steps: Vec<Step>,
    /// What must show, beside that no promise is broken.
    pub musts: Vec<Must>,
}

/// Something that must show in the record of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Must {
    /// The first host brings the controller up.
    Attach,
    /// It does not, and says why in these words.
    Refuse(&'static str),
    /// The driver tells of this.
    Tell(&'static str),
    /// The driver does not tell of this.
    Hush(&'static str),
    /// Every request succeeds, faults or not.
    Succeed,
    /// Some requests fail with what the device said.
    Fail,
    /// Some requests are given up by the host.
    Abort,
    /// When the faults end, the driver is so far.
    Stand(State),
    /// No queue pair comes into use.
    NoLanes,
    /// The IOMMU turns something away.
    Block,
    /// The fault strikes at least so often.
    Strike(u64),
    /// A new host has to be brought in.
    Reattach,
    /// No new host has to be brought in.
    Survive,
    /// The harness finds this: the fault is one that no driver can defend against.
    Find(&'static str),
}

impl Scenario {
    /// The ordinary session in a default world.
    pub fn session(name: impl Into<String>, musts: &[Must]) -> Self {
        Self {
            name: name.into(),
            options: WorldOptions::default(),
            steps: SESSION.to_vec(),
            musts: musts.to_vec(),
        }
    }

    /// With these faults of the device.
    #[must_use]
    pub fn plan(mut self, plan: &[Mischief]) -> Self {
        self.options.plan = plan.to_vec();
        self
    }

    /// With another course.
    #[must_use]
    pub fn steps(mut self, steps: &[Step]) -> Self {
        self.steps = steps.to_vec();
        self
    }

    /// With another world.
    #[must_use]
    pub fn world(mut self, change: impl FnOnce(&mut WorldOptions)) -> Self {
        change(&mut self.options);
        self
    }

    /// Runs it. A panic of the code under test ends it as a failure, where panics unwind.
    pub fn run(&self) -> Record {
        let ran = catch_unwind(AssertUnwindSafe(|| match World::new(&self.options) {
            Ok(world) => Course::new(world).run(&self.steps),
            Err(message) => {
                Record { failure: Some(Failure::Panic { message }), ..Record::default() }
            }
        }));
        let mut record = ran.unwrap_or_else(|cause| {
            let failure = Some(Failure::Panic { message: message_of(&*cause) });
            Record { failure, ..Record::default() }
        });
        self.hold_to_musts(&mut record);
        record
    }

    /// Turns what is missing into a failure, and a failure that must be found into none.
    fn hold_to_musts(&self, record: &mut Record) {
        let finds = self.musts.iter().find_map(|must| match must {
            Must::Find(words) => Some(*words),
            _ => None,
        });
        if let Some(words) = finds {
            let found = record.failure.take().map_or("nothing".to_owned(), |one| one.to_string());
            if !found.contains(words) {
                let expected = format!("the harness finds `{words}`");
                record.failure = Some(Failure::Expectation { expected, found });
            }
            return;
        }
        if record.failure.is_none()
            && let Some(must) = self.musts.iter().find(|must| !must.holds(record))
        {
            let found = format!("{}", Summary(record));
            record.failure = Some(Failure::Expectation { expected: must.to_string(), found });
        }
    }
}

impl Must {
    fn holds(&self, record: &Record) -> bool {
        let counts = record.counts;
        let tells = |words: &str| record.told.iter().any(|told| told.contains(words));
        match *self {
            Self::Attach => record.refused.is_none(),
            Self::Refuse(words) => record.refused.as_ref().is_some_and(|why| why.contains(words)),
            Self::Tell(words) => tells(words),
            Self::Hush(words) => !tells(words),
            Self::Succeed => counts.submitted > 0 && counts.succeeded == counts.submitted,
            Self::Fail => counts.failed > 0,
            Self::Abort => counts.aborted > 0,
            Self::Stand(state) => record.state == Some(state),
            Self::NoLanes => record.lanes == 0,
            Self::Block => record.blocked > 0,
            Self::Strike(times) => record.deeds >= times,
            Self::Reattach => record.reattached,
            Self::Survive => !record.reattached,
            Self::Find(_) => true,
        }
    }
}

impl fmt::Display for Must {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Attach => write!(out, "the first host attaches"),
            Self::Refuse(words) => write!(out, "the attach is refused with `{words}`"),
            Self::Tell(words) => write!(out, "an event `{words}`"),
            Self::Hush(words) => write!(out, "no event `{words}`"),
            Self::Succeed => write!(out, "all requests succeed"),
            Self::Fail => write!(out, "some requests fail"),
            Self::Abort => write!(out, "some requests are given up by the host"),
            Self::Stand(state) => write!(out, "the driver is {state:?} when faults end"),
            Self::NoLanes => write!(out, "no queue pair in use"),
            Self::Block => write!(out, "an access is turned away"),
            Self::Strike(times) => write!(out, "the fault strikes {times} times"),
            Self::Reattach => write!(out, "a second host is needed"),
            Self::Survive => write!(out, "no second host is needed"),
            Self::Find(words) => write!(out, "the harness finds `{words}`"),
        }
    }
}

/// A record in a line.
struct Summary<'a>(&'a Record);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Record { refused, told, counts, state, lanes, blocked, deeds, reattached, .. } = self.0;
        write!(
            out,
            "refused {refused:?}, {state:?} with {lanes} lanes, {counts:?}, {blocked} blocked, \
             {deeds} deeds, reattached {reattached}, told {told:?}"
        )
    }
}

fn message_of(cause: &(dyn Any + Send)) -> String {
    let text = cause.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| cause.downcast_ref::<String>().cloned()).unwrap_or_default()
}
