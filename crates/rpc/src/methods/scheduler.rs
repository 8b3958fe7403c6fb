//! Scheduler: settings, last plan and moves.

use core::fmt;

use serde_json::{Value, json};
use tenmil_base::Span;
use tenmil_linux::CpuList;
use tenmil_linux::frequency_control::FrequencyRequest;
use tenmil_reactor::load_balancer::BalancerHandle;
use tenmil_reactor::thread_scheduler::{Migration, Options};

use crate::error::{ErrorCode, RpcError};
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

/// Source of the process's scheduler. A function, because a program may start it after the control
/// server.
pub struct SchedulerSource(Box<SchedulerLookup>);

type SchedulerLookup = dyn Fn() -> Option<BalancerHandle> + Send + Sync;

const PERCENT: ParamType = ParamType::Whole { min: 0, max: 100 };
/// Up to one hour.
const MILLISECONDS: ParamType = ParamType::Whole { min: 1, max: 3_600_000 };

const CORE: ParamType = ParamType::Whole { min: 0, max: 4095 };

const fn setting_parameter(name: &'static str, kind: ParamType, help: &'static str) -> Parameter {
    Parameter { name, kind, need: ParamDefault::Optional, help }
}

const MIGRATION: &[FieldSchema] = &[
    FieldSchema::new("thread", ResultType::Whole, "identifier of the thread"),
    FieldSchema::new("from", ResultType::Whole, "core that the thread was on"),
    FieldSchema::new("to", ResultType::Whole, "core that the thread migrates to"),
    FieldSchema::new("reason", ResultType::Text, "reason"),
];

const FREQUENCY: &[FieldSchema] = &[
    FieldSchema::new("core", ResultType::Whole, "the core"),
    FieldSchema::new("frequency", ResultType::Text, "last request to its frequency governor"),
];

const SCHEDULER: ResultType = ResultType::Record(&[
    FieldSchema::new("policy", ResultType::Text, "placement policy"),
    FieldSchema::new("period_ns", ResultType::Whole, "sampling period of the load"),
    FieldSchema::new(
        "load_limit_percent",
        ResultType::Whole,
        "load below which a thread counts as idle",
    ),
    FieldSchema::new(
        "core_limit_percent",
        ResultType::Whole,
        "load above which a reactor with several threads migrates some away",
    ),
    FieldSchema::new(
        "core_busy_percent",
        ResultType::Whole,
        "load from which a reactor may be saturated",
    ),
    FieldSchema::new(
        "migration_interval_ns",
        ResultType::Whole,
        "minimum time between two migrations of a thread",
    ),
    FieldSchema::new(
        "scheduling_core",
        ResultType::Maybe(&ResultType::Whole),
        "configured core for idle threads",
    ),
    FieldSchema::new("isolated", ResultType::Text, "cores reserved for threads that request them"),
    FieldSchema::new(
        "idle_core",
        ResultType::Maybe(&ResultType::Whole),
        "current core for idle threads",
    ),
    FieldSchema::new("empty", ResultType::Text, "cores without threads in the last plan"),
    FieldSchema::new("migrations", ResultType::Rows(MIGRATION), "migrations of the last plan"),
    FieldSchema::new(
        "frequencies",
        ResultType::Rows(FREQUENCY),
        "frequency requests by core, if a governor is in use",
    ),
]);

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "scheduler",
        parameters: &[],
        answer: SCHEDULER,
        help: "Show the settings of the scheduler and its last plan",
        example: "tenmil get scheduler",
        run: |call| Ok(scheduler_json(&balancer_handle_of(call)?)),
    },
    Method {
        verb: MethodKind::Set,
        name: "scheduler",
        parameters: &[
            setting_parameter(
                "policy",
                ParamType::OneOf(&["static", "dynamic"]),
                "placement policy",
            ),
            setting_parameter("period_ms", MILLISECONDS, "sampling period of the load"),
            setting_parameter(
                "load_limit",
                PERCENT,
                "load below which a thread counts as idle, in percent",
            ),
            setting_parameter(
                "core_limit",
                PERCENT,
                "load above which a reactor migrates threads away, in percent",
            ),
            setting_parameter(
                "core_busy",
                PERCENT,
                "load from which a reactor may be saturated, in percent",
            ),
            setting_parameter(
                "migration_interval_ms",
                MILLISECONDS,
                "minimum time between two migrations of a thread",
            ),
            setting_parameter("scheduling_core", CORE, "core for idle threads"),
            setting_parameter(
                "isolated",
                ParamType::Cores,
                "cores reserved for threads that request them",
            ),
            setting_parameter(
                "share_all",
                ParamType::Flag,
                "true to reserve no cores and to choose the core for idle threads freely",
            ),
        ],
        answer: SCHEDULER,
        help: "Change the settings of the scheduler; they take effect at the end of the current period",
        example: "tenmil set scheduler policy=dynamic period_ms=500 load_limit=20",
        run: set_scheduler_method,
    },
];

impl SchedulerSource {
    /// Creates a source from the function `find`.
    pub fn new(find: impl Fn() -> Option<BalancerHandle> + Send + Sync + 'static) -> Self {
        Self(Box::new(find))
    }
}

impl fmt::Debug for SchedulerSource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("Balancing").field(&(self.0)()).finish()
    }
}

fn balancer_handle_of(call: &CallContext<'_>) -> Result<BalancerHandle, RpcError> {
    let found = (call.state.find_part::<SchedulerSource>("scheduler")?.0)();
    found.ok_or_else(|| {
        let message = "this process balances no threads now, expected one that does";
        RpcError::usage(ErrorCode::NotFound, message)
    })
}

fn scheduler_json(steering: &BalancerHandle) -> Value {
    let (options, plan) = (steering.options(), steering.last_plan());
    let row = |order: &Migration| {
        json!({
            "thread": order.thread,
            "from": order.from,
            "to": order.to,
            "reason": order.reason.to_string(),
        })
    };
    let frequency = |(core, request): (u32, FrequencyRequest)| json!({ "core": core, "frequency": request.name() });
    json!({
        "policy": options.policy.to_string(),
        "period_ns": options.period.ns,
        "load_limit_percent": options.load_limit,
        "core_limit_percent": options.core_limit,
        "core_busy_percent": options.core_busy,
        "migration_interval_ns": options.migration_interval.ns,
        "scheduling_core": options.scheduling_core,
        "isolated": options.isolated.to_string(),
        "idle_core": plan.idle_core,
        "empty": plan.empty.to_string(),
        "migrations": plan.migrations.iter().map(row).collect::<Vec<_>>(),
        "frequencies": steering.last_frequency_requests().into_iter().map(frequency).collect::<Vec<_>>(),
    })
}

fn set_scheduler_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let steering = balancer_handle_of(call)?;
    let options = options_with_arguments(call, steering.options())?;
    steering.set_options(options).map_err(|why| options_rpc_error(&why))?;
    Ok(scheduler_json(&steering))
}

fn options_with_arguments(
    call: &CallContext<'_>,
    mut options: Options,
) -> Result<Options, RpcError> {
    let given = |name| call.arguments.integer(name);
    let percent = |name, now: u8| given(name).and_then(|it| u8::try_from(it).ok()).unwrap_or(now);
    let span = |name, now| given(name).map_or(now, Span::from_ms);
    if let Some(policy) = call.arguments.text("policy") {
        options.policy = policy.parse().map_err(|why| options_rpc_error(&why))?;
    }
    options.period = span("period_ms", options.period);
    options.migration_interval = span("migration_interval_ms", options.migration_interval);
    options.load_limit = percent("load_limit", options.load_limit);
    options.core_limit = percent("core_limit", options.core_limit);
    options.core_busy = percent("core_busy", options.core_busy);
    if call.arguments.boolean("share_all").unwrap_or(false) {
        (options.scheduling_core, options.isolated) = (None, CpuList::default());
    }
    let core = given("scheduling_core").and_then(|core| u32::try_from(core).ok());
    options.scheduling_core = core.or(options.scheduling_core);
    if let Some(cores) = call.arguments.cores("isolated") {
        options.isolated = cores.clone();
    }
    Ok(options)
}

fn options_rpc_error(why: &tenmil_reactor::thread_scheduler::OptionsError) -> RpcError {
    let message = format!("set scheduler: {why}");
    RpcError { code: ErrorCode::BadValue, category: why.category(), message, hint: None }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_linux::CpuList;
    use tenmil_linux::cpu_topology::{AvailableCpus, CpuLocation};
    use tenmil_linux::frequency_control::{FrequencyError, FrequencyRequest};
    use tenmil_reactor::load_balancer::{CpuPlatform, new_balancer};
    use tenmil_reactor::thread_scheduler::Options;

    use super::SchedulerSource;
    use crate::ProcessParts;
    use crate::error::ErrorCode;
    use crate::methods::test_calls::call_method;

    /// Machine without any known topology.
    struct Nowhere;

    impl CpuPlatform for Nowhere {
        fn available_cpus(&mut self) -> AvailableCpus {
            AvailableCpus::default()
        }

        fn controls_frequency(&self) -> bool {
            false
        }

        fn request_frequencies(&mut self, _: Vec<(u32, FrequencyRequest)>) -> Vec<FrequencyError> {
            Vec::new()
        }
    }

    fn method_state() -> ProcessParts {
        let place = |core| CpuLocation { core, siblings: CpuList::default(), node: None };
        let places = vec![place(0), place(1)];
        let (_balancer, steering) = new_balancer(Options::default(), places, Nowhere).unwrap();
        ProcessParts::new().with_part(SchedulerSource::new(move || Some(steering.clone())))
    }

    #[test]
    fn settings_change_together_and_omitted_ones_stay() {
        let state = method_state();
        let before = call_method(&state, "scheduler", &json!({})).unwrap();
        assert_eq!(before["policy"], "static");
        let change = json!({ "policy": "dynamic", "period_ms": 500, "load_limit": 30 });
        let after = call_method(&state, "set_scheduler", &change).unwrap();
        assert_eq!(after["policy"], "dynamic");
        assert_eq!(after["period_ns"], 500_000_000);
        assert_eq!(after["load_limit_percent"], 30);
        for name in ["core_limit_percent", "core_busy_percent", "migration_interval_ns"] {
            assert_eq!(after[name], before[name], "{name}");
        }
        assert_eq!(call_method(&state, "scheduler", &json!({})).unwrap(), after);
        call_method(&state, "set_scheduler", &json!({ "policy": "static" })).unwrap();
        let back = call_method(&state, "scheduler", &json!({})).unwrap();
        assert_eq!((&back["policy"], &back["period_ns"]), (&before["policy"], &after["period_ns"]));
    }

    #[test]
    fn core_specific_settings_are_added_and_removed() {
        let state = method_state();
        let change = json!({ "scheduling_core": 1, "isolated": "0" });
        let after = call_method(&state, "set_scheduler", &change).unwrap();
        assert_eq!((&after["scheduling_core"], &after["isolated"]), (&json!(1), &json!("0")));
        for (change, named) in [
            (json!({ "scheduling_core": 9 }), "scheduling core is 9"),
            (json!({ "isolated": "0-1" }), "isolated cores are 0-1"),
            (json!({ "scheduling_core": 0 }), "scheduling core 0 is isolated"),
        ] {
            let refusal = call_method(&state, "set_scheduler", &change).unwrap_err();
            assert!(refusal.message.contains(named), "{refusal}");
        }
        assert_eq!(call_method(&state, "scheduler", &json!({})).unwrap(), after);
        let after = call_method(&state, "set_scheduler", &json!({ "share_all": true })).unwrap();
        assert_eq!((&after["scheduling_core"], &after["isolated"]), (&Value::Null, &json!("")));
    }

    #[test]
    fn inconsistent_limits_are_rejected_and_change_nothing() {
        let state = method_state();
        let before = call_method(&state, "scheduler", &json!({})).unwrap();
        let change = json!({ "policy": "dynamic", "load_limit": 90, "core_limit": 50 });
        let refusal = call_method(&state, "set_scheduler", &change).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::BadValue);
        assert!(refusal.message.contains("90"), "{refusal}");
        assert_eq!(call_method(&state, "scheduler", &json!({})).unwrap(), before);
    }

    #[test]
    fn process_without_balancer_reports_that() {
        let not_now = ProcessParts::new().with_part(SchedulerSource::new(|| None));
        for (state, found) in
            [(ProcessParts::new(), "has no scheduler"), (not_now, "balances no threads")]
        {
            for method in ["scheduler", "set_scheduler"] {
                let refusal = call_method(&state, method, &json!({})).unwrap_err();
                assert_eq!(refusal.code, ErrorCode::NotFound);
                assert!(refusal.message.contains(found), "{refusal}");
            }
        }
    }
}
