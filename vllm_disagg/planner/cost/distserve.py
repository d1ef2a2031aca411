"""DistServe's published A100-80GB measurements, so that its results can be reproduced.

Source: github.com/LLMServe/DistServe, commit 82831f1 (Apache-2.0). The fits are those of
simdistserve/estimators/profile_data/profiler-a100-80g.{distserve,vllm}.json, in milliseconds. The
constant of a stage (1 ms * PP for a prefill) is from time_estimator.py. The constant of the first
stage ("ray overhead", 2 ms + 0.0001 ms a token) is from base/worker.py. There is no profile of
OPT-175B.
"""

from __future__ import annotations

from ...errors import ConfigError
from .latency import LinearLatency

LARGE_BATCH_SEQUENCES = 95  # the second decode fit holds from here on
GPU_MEMORY_BYTES = float(80 << 30)  # of its A100, as profile_memory.py has it
MEMORY_UTILIZATION = 0.94  # of its engine: 0.95 less 1 % at the peak

FitRow = tuple[float, float, float]

# {engine: {model: {tp: (prefill a b c, decode of small batches A B C, decode of large batches A B
# C)}}}
COEFFICIENTS: dict[str, dict[str, dict[int, tuple[FitRow, FitRow, FitRow]]]] = {
    "distserve-a100": {
        "opt-13b": {
            1: (
                (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
                (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
                (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
            ),
            2: (
                (14.742973695171262, 0.06857720739764, 2.4495727400243586e-06),
                (13.294796350285385, 0.00034109219700723494, 0.06296393225243659),
                (10.638741913126715, 0.00031183369638295723, 0.08562913604102729),
            ),
            4: (
                (12.062297033449054, 0.03808140082550695, 5.226249731787869e-07),
                (10.256231678259395, 0.00018786702316166354, 0.03269273629225551),
                (10.483514938375274, 0.00017120888562939117, 0.04566648525887034),
            ),
        },
        "opt-66b": {
            2: (
                (43.05881348288936, 0.2742292870458432, 2.2478042467169447e-05),
                (48.288015489286245, 0.0009424343535737985, 0.12755020094383188),
                (28.727693993711597, 0.00047448475459061987, 0.29617792360743994),
            ),
            3: (
                (32.998230028437035, 0.19568256864690514, 1.2205248980953765e-05),
                (35.8015439512012, 0.0005845004786127403, 0.0952669764890301),
                (22.653861586978355, 0.0005358489190129727, 0.208514444037787),
            ),
            4: (
                (29.441636037717455, 0.151352180625198, 8.317450765979451e-06),
                (30.760284619429587, 0.000451947603788462, 0.063284195750671),
                (27.47082137429487, 0.0004046845541646486, 0.12480667738300383),
            ),
            8: (
                (25.490662375045222, 0.10659177664763161, 3.3910502518615973e-06),
                (23.15511135047022, 0.00022691488497826264, 0.04800638397272423),
                (21.71772781576609, 0.0003758089655762475, 0.08978614175851013),
            ),
        },
    },
    "distserve-vllm-a100": {
        "opt-13b": {
            1: (
                (22.052204789310185, 0.14050923870128956, 8.076584822611088e-06),
                (23.475041008414784, 0.000592934466077393, 0.060726861260369455),
                (20.206356173691958, 0.0004907727036234946, 0.1200031385587413),
            ),
            2: (
                (27.440806247810684, 0.0905453268062731, 8.452054313246025e-06),
                (24.54058424191086, 0.00022440145424035404, 0.08715787269447899),
                (17.947769467112806, 0.0004570851465217072, 0.11179075830699213),
            ),
            4: (
                (30.536322590049405, 0.05150644936810146, 4.232473132942393e-07),
                (25.90114444283343, 7.753634454230709e-05, 0.05528087160867803),
                (23.88388468859458, 0.00028400164093310935, 0.06276523831046728),
            ),
        },
        "opt-66b": {
            2: (
                (58.3822026348141, 0.3826408030281867, -7.1141486747694485e-06),
                (57.07344137197128, 0.0036461138777547255, 0.2249373634499222),
                (26.983759428854572, 0.006200132376379982, 0.4482569479277445),
            ),
            3: (
                (45.74453423698261, 0.2778127747865773, 3.64624693008797e-05),
                (44.93958620555262, 0.0008096152552620141, 0.21287979591036174),
                (43.69602916834496, 0.0008402567346080152, 0.24006467608312998),
            ),
            4: (
                (42.965489361973944, 0.2128658422785494, 4.601017396226869e-05),
                (39.58178936012414, 0.0006945721692406896, 0.13580868185596764),
                (40.859718006896806, 0.0004264871259058686, 0.19508372547790553),
            ),
            8: (
                (38.931193445523604, 0.1573682229779579, 4.531676245669589e-06),
                (31.176041922273107, 0.00027556543631760213, 0.0679770397053775),
                (29.087774405517447, 0.0006027720257746419, 0.1389608688300688),
            ),
        },
    },
}


def degrees(coefficients: str, model: str) -> list[int]:
    """Lists the measured tensor parallel sizes. Raises ConfigError for an unknown set or model."""
    if coefficients not in COEFFICIENTS:
        raise ConfigError(
            f"--coefficients: {coefficients} is not known: give one of {', '.join(COEFFICIENTS)}"
        )
    table = COEFFICIENTS[coefficients]
    if model not in table:
        raise ConfigError(
            f"--coefficients {coefficients} has no {model}: give --model {' or '.join(table)}"
        )
    return list(table[model])


def latency(coefficients: str, model: str, tp: int, pp: int) -> LinearLatency:
    """Returns the fit for one instance, in seconds."""
    prefill, small, large = COEFFICIENTS[coefficients][model][tp]
    return LinearLatency(
        pp,
        _seconds(prefill),
        _seconds(small),
        _seconds(large),
        LARGE_BATCH_SEQUENCES,
        stage=1e-3 * pp,
        overhead=2e-3,
        overhead_token=1e-7,
    )


def _seconds(row: FitRow) -> FitRow:
    """Converts milliseconds."""
    return row[0] / 1e3, row[1] / 1e3, row[2] / 1e3
