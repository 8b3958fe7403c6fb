//! The scheduler: who lives where, by which rules.

use core::fmt;

use base::Span;
use host::Cores;
use host::frequency::Speed;
use reactor::balance::Steering;
use reactor::schedule::{Move, Options};
use serde_json::{Value, json};

use crate::kind::Kind;
use crate::method::{Call, Method, Need, Parameter, Verb};
use crate::refusal::{Code, Refusal};
use crate::shape::{Field, Shape};

/// Where what balances a program's threads is found, while something does. A program that starts it
/// later than it starts to serve gives a function that looks.
pub struct Balancing(Box<Find>);

type Find = dyn Fn() -> Option<Steering> + Send + Sync;

const PERCENT: Kind = Kind::Whole { min: 0, max: 100 };
/// Up to an hour.
const MILLISECONDS: Kind = Kind::Whole { min: 1, max: 3_600_000 };

const CORE: Kind = Kind::Whole { min: 0, max: 4095 };

const fn setting(name: &'static str, kind: Kind, help: &'static str) -> Parameter {
    Parameter { name, kind, need: Need::Optional, help }
}

const MOVE: &[Field] = &[
    Field::new("thread", Shape::Whole, "number of the thread"),
    Field::new("from", Shape::Whole, "the core it was on"),
    Field::new("to", Shape::Whole, "the core it was sent to"),
    Field::new("reason", Shape::Text, "why"),
];

const SPEED: &[Field] = &[
    Field::new("core", Shape::Whole, "the core"),
    Field::new("speed", Shape::Text, "what its governor was asked for last"),
];

const SCHEDULER: Shape = Shape::Record(&[
    Field::new("policy", Shape::Text, "how threads are spread"),
    Field::new("period_ns", Shape::Whole, "how often loads are collected"),
    Field::new("load_limit_percent", Shape::Whole, "a thread busy for less is idle"),
    Field::new("core_limit_percent", Shape::Whole, "a busier reactor of several threads sheds"),
    Field::new("core_busy_percent", Shape::Whole, "from here on a reactor may hide work"),
    Field::new("rest_ns", Shape::Whole, "no thread moves twice within this time"),
    Field::new("scheduling_core", Shape::Maybe(&Shape::Whole), "where idle threads gather, if set"),
    Field::new("isolated", Shape::Text, "cores for threads that ask for them"),
    Field::new("gathering", Shape::Maybe(&Shape::Whole), "where idle threads gather now"),
    Field::new("empty", Shape::Text, "cores left without a thread by the last plan"),
    Field::new("moves", Shape::Rows(MOVE), "moves of the last plan"),
    Field::new("speeds", Shape::Rows(SPEED), "how fast cores were asked to run, if governed"),
]);

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: Verb::Get,
        name: "scheduler",
        parameters: &[],
        answer: SCHEDULER,
        help: "Tell the scheduler's settings and what it planned last",
        example: "tenmil get scheduler",
        run: |call| Ok(scheduler(&steering(call)?)),
    },
    Method {
        verb: Verb::Set,
        name: "scheduler",
        parameters: &[
            setting("policy", Kind::OneOf(&["static", "dynamic"]), "how to spread threads"),
            setting("period_ms", MILLISECONDS, "how often to collect loads"),
            setting("load_limit", PERCENT, "percent of a period below which a thread is idle"),
            setting("core_limit", PERCENT, "percent above which a reactor sheds"),
            setting("core_busy", PERCENT, "percent from which a reactor may hide work"),
            setting("rest_ms", MILLISECONDS, "time in which no thread moves twice"),
            setting("scheduling_core", CORE, "the core where idle threads gather"),
            setting("isolated", Kind::Cores, "cores for threads that ask for them, and no others"),
            setting("share_all", Kind::Flag, "true to isolate no core and gather anywhere"),
        ],
        answer: SCHEDULER,
        help: "Change the scheduler's settings, from the end of the running period on",
        example: "tenmil set scheduler policy=dynamic period_ms=500 load_limit=20",
        run: set_scheduler,
    },
];

impl Balancing {
    /// What `find` finds.
    pub fn new(find: impl Fn() -> Option<Steering> + Send + Sync + 'static) -> Self {
        Self(Box::new(find))
    }
}

impl fmt::Debug for Balancing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Balancing").field(&(self.0)()).finish()
    }
}

fn steering(call: &Call<'_>) -> Result<Steering, Refusal> {
    let found = (call.state.part::<Balancing>("scheduler")?.0)();
    found.ok_or_else(|| {
        let message = "this process balances no threads now, expected one that does";
        Refusal::caller(Code::Absent, message)
    })
}

fn scheduler(steering: &Steering) -> Value {
    let (options, plan) = (steering.options(), steering.plan());
    let row = |order: &Move| {
        json!({
            "thread": order.thread,
            "from": order.from,
            "to": order.to,
            "reason": order.reason.to_string(),
        })
    };
    let speed = |(core, speed): (u32, Speed)| json!({ "core": core, "speed": speed.name() });
    json!({
        "policy": options.policy.to_string(),
        "period_ns": options.period.ns,
        "load_limit_percent": options.load_limit,
        "core_limit_percent": options.core_limit,
        "core_busy_percent": options.core_busy,
        "rest_ns": options.rest.ns,
        "scheduling_core": options.scheduling_core,
        "isolated": options.isolated.to_string(),
        "gathering": plan.gathering,
        "empty": plan.empty.to_string(),
        "moves": plan.moves.iter().map(row).collect::<Vec<_>>(),
        "speeds": steering.speeds().into_iter().map(speed).collect::<Vec<_>>(),
    })
}

fn set_scheduler(call: &Call<'_>) -> Result<Value, Refusal> {
    let steering = steering(call)?;
    let options = changed(call, steering.options())?;
    steering.set_options(options).map_err(|why| refused(&why))?;
    Ok(scheduler(&steering))
}

fn changed(call: &Call<'_>, mut options: Options) -> Result<Options, Refusal> {
    let given = |name| call.arguments.whole(name);
    let percent = |name, now: u8| given(name).and_then(|it| u8::try_from(it).ok()).unwrap_or(now);
    let span = |name, now| given(name).map_or(now, Span::from_ms);
    if let Some(policy) = call.arguments.text("policy") {
        options.policy = policy.parse().map_err(|why| refused(&why))?;
    }
    options.period = span("period_ms", options.period);
    options.rest = span("rest_ms", options.rest);
    options.load_limit = percent("load_limit", options.load_limit);
    options.core_limit = percent("core_limit", options.core_limit);
    options.core_busy = percent("core_busy", options.core_busy);
    if call.arguments.flag("share_all").unwrap_or(false) {
        (options.scheduling_core, options.isolated) = (None, Cores::default());
    }
    let core = given("scheduling_core").and_then(|core| u32::try_from(core).ok());
    options.scheduling_core = core.or(options.scheduling_core);
    if let Some(cores) = call.arguments.cores("isolated") {
        options.isolated = cores.clone();
    }
    Ok(options)
}

fn refused(why: &reactor::schedule::OptionsError) -> Refusal {
    let message = format!("set scheduler: {why}");
    Refusal { code: Code::BadValue, blame: why.blame(), message, hint: None }
}

#[cfg(test)]
mod tests {
    use host::Cores;
    use host::frequency::{FrequencyError, Speed};
    use host::topology::{Ours, Place};
    use reactor::balance::{Ground, balancer};
    use reactor::schedule::Options;
    use serde_json::{Value, json};

    use super::Balancing;
    use crate::methods::TABLE;
    use crate::refusal::{Code, Refusal};
    use crate::{Arguments, Call, Later, State};

    /// A machine about which nothing is known.
    struct Nowhere;

    impl Ground for Nowhere {
        fn ours(&mut self) -> Ours {
            Ours::default()
        }

        fn governs(&self) -> bool {
            false
        }

        fn run_at(&mut self, _: Vec<(u32, Speed)>) -> Vec<FrequencyError> {
            Vec::new()
        }
    }

    fn state() -> State {
        let place = |core| Place { core, siblings: Cores::default(), node: None };
        let places = vec![place(0), place(1)];
        let (_balancer, steering) = balancer(Options::default(), places, Nowhere).unwrap();
        State::new().with(Balancing::new(move || Some(steering.clone())))
    }

    /// What a method answers, which has the shape that its row says.
    fn ask(state: &State, method: &str, parameters: &Value) -> Result<Value, Refusal> {
        let method = TABLE.find(method).unwrap();
        let arguments = Arguments::check(method, parameters.as_object().unwrap())?;
        let answer = (method.run)(&Call {
            table: &TABLE,
            state,
            arguments: &arguments,
            later: &Later::default(),
            passed: &crate::Passed::default(),
        })?;
        assert_eq!(method.answer.check(&answer), Ok(()));
        Ok(answer)
    }

    #[test]
    fn settings_change_together_and_stay_where_nothing_is_said() {
        let state = state();
        let before = ask(&state, "scheduler", &json!({})).unwrap();
        assert_eq!(before["policy"], "static");
        let change = json!({ "policy": "dynamic", "period_ms": 500, "load_limit": 30 });
        let after = ask(&state, "set_scheduler", &change).unwrap();
        assert_eq!(after["policy"], "dynamic");
        assert_eq!(after["period_ns"], 500_000_000);
        assert_eq!(after["load_limit_percent"], 30);
        for name in ["core_limit_percent", "core_busy_percent", "rest_ns"] {
            assert_eq!(after[name], before[name], "{name}");
        }
        assert_eq!(ask(&state, "scheduler", &json!({})).unwrap(), after);
        ask(&state, "set_scheduler", &json!({ "policy": "static" })).unwrap();
        let back = ask(&state, "scheduler", &json!({})).unwrap();
        assert_eq!((&back["policy"], &back["period_ns"]), (&before["policy"], &after["period_ns"]));
    }

    #[test]
    fn cores_get_a_part_of_their_own_and_lose_it_again() {
        let state = state();
        let change = json!({ "scheduling_core": 1, "isolated": "0" });
        let after = ask(&state, "set_scheduler", &change).unwrap();
        assert_eq!((&after["scheduling_core"], &after["isolated"]), (&json!(1), &json!("0")));
        for (change, named) in [
            (json!({ "scheduling_core": 9 }), "scheduling core is 9"),
            (json!({ "isolated": "0-1" }), "isolated cores are 0-1"),
            (json!({ "scheduling_core": 0 }), "scheduling core 0 is isolated"),
        ] {
            let refusal = ask(&state, "set_scheduler", &change).unwrap_err();
            assert!(refusal.message.contains(named), "{refusal}");
        }
        assert_eq!(ask(&state, "scheduler", &json!({})).unwrap(), after);
        let after = ask(&state, "set_scheduler", &json!({ "share_all": true })).unwrap();
        assert_eq!((&after["scheduling_core"], &after["isolated"]), (&Value::Null, &json!("")));
    }

    #[test]
    fn limits_out_of_order_are_refused_and_change_nothing() {
        let state = state();
        let before = ask(&state, "scheduler", &json!({})).unwrap();
        let change = json!({ "policy": "dynamic", "load_limit": 90, "core_limit": 50 });
        let refusal = ask(&state, "set_scheduler", &change).unwrap_err();
        assert_eq!(refusal.code, Code::BadValue);
        assert!(refusal.message.contains("90"), "{refusal}");
        assert_eq!(ask(&state, "scheduler", &json!({})).unwrap(), before);
    }

    #[test]
    fn where_nothing_is_balanced_that_is_said() {
        let not_now = State::new().with(Balancing::new(|| None));
        for (state, found) in [(State::new(), "has no scheduler"), (not_now, "balances no threads")]
        {
            for method in ["scheduler", "set_scheduler"] {
                let refusal = ask(&state, method, &json!({})).unwrap_err();
                assert_eq!(refusal.code, Code::Absent);
                assert!(refusal.message.contains(found), "{refusal}");
            }
        }
    }
}
